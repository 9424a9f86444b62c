"""Simulations by other programs: LAMMPS and i-PI.

`qualms.engines.lammps` and `qualms.engines.ipi` compute energies, forces and virials with
`qualms.ase.Calculator`, in the process of the program or of its client. `qualms.engines.export`
writes the files that their inputs name.
"""
