import pytest
from hypothesis import settings

# Arrays are slow to draw on a busy machine; what is tested is not how fast they are drawn.
settings.register_profile("qualms", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("qualms")


@pytest.fixture(scope="session")
def molecules():
    """200 molecules of QM9, not to be changed."""
    from atomistic_fixtures import labelled_molecules

    return labelled_molecules(200)


@pytest.fixture(scope="session")
def energy_model(molecules):
    """A model of the energies of the first 120 molecules."""
    from atomistic_fixtures import make_model

    return make_model(units="eV", n_representatives=150).fit(molecules[:120])


@pytest.fixture(scope="session")
def shift_model(molecules):
    """A model of the shifts of hydrogen atoms in the first 60 molecules."""
    from atomistic_fixtures import make_model

    return make_model("shift", "atomic", species="H").fit(molecules[:60])


@pytest.fixture(scope="session")
def alloys():
    """36 alloys with energies, forces and stresses, not to be changed."""
    from atomistic_fixtures import labelled_alloys

    return labelled_alloys()


@pytest.fixture(scope="session")
def force_model(alloys):
    """A model of energies, forces and stresses of the first 26 alloys."""
    from atomistic_fixtures import make_force_model

    return make_force_model(units="eV", stress="virtual").fit(alloys[:26])


@pytest.fixture
def no_figures(monkeypatch):
    """Omit the figures of reports, which take most of the time."""
    none = dict.fromkeys(
        ("conditional", "reliability", "binned", "z_scores", "residuals"), "data:,"
    )
    monkeypatch.setattr("qualms.report.report.report_figures", lambda evaluation: none)


@pytest.fixture(scope="session")
def source(tmp_path_factory, molecules):
    """A directory with models, structures and predictions, which no test may change."""
    import ase.io
    import numpy as np
    from atomistic_fixtures import make_model

    folder = tmp_path_factory.mktemp("source")
    model = make_model(units="eV", n_representatives=60, n_members=8).fit(molecules[:100])
    model.save(folder / "model.safetensors")
    shifts = make_model("shift", "atomic", species="N", n_representatives=30, n_members=8)
    shifts.fit(molecules[:100]).save(folder / "atoms.safetensors")
    ase.io.write(folder / "new.xyz", molecules[100:])
    rng = np.random.default_rng(0)
    std = rng.uniform(0.5, 2, size=60)
    members = rng.normal(size=(60, 8)) * std[:, None]
    np.savez(folder / "members.npz", REF_e=std * rng.normal(size=60), e_ensemble=members)
    return folder


@pytest.fixture
def desk(source, tmp_path, monkeypatch):
    """A directory with links to the files of `source`."""
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
