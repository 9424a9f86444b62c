"""Simulations by other programs: LAMMPS, i-PI and those that run models of metatomic.

`qualms.engines.lammps` and `qualms.engines.ipi` compute energies, forces and virials with
`qualms.ase.Calculator`, in the process of the program or of its client. `qualms.engines.metatomic`
is the model in torch. `qualms.engines.export` writes the files for all of them.
"""
