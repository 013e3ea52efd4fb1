"""The programs that role `build` runs on hosts do what their first lines say."""

import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

FILES = Path(__file__).parents[1] / "roles" / "build" / "files"


def program(path: str) -> ModuleType:
    """One of the role's programs, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, FILES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # They import one another by name, as they do on the host.
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    return module


elf = program("recipe/elf.py")
install = program("recipe/install.py")
prune = program("recipe/prune.py")
seal = program("recipe/seal.py")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A copy of a real shared object."""
    found = next(Path("/lib/x86_64-linux-gnu").glob("libz.so.1*"))
    return Path(shutil.copy(found.resolve(), tmp_path / "libz.so"))


def test_needs_of_a_shared_object_are_read(library: Path) -> None:
    """Every library of a distribution needs the C library."""
    assert elf.needed(library) == ["libc.so.6"]


def test_only_elf_files_are_taken_for_such(tmp_path: Path, library: Path) -> None:
    """Scripts, empty files and links are not touched."""
    (tmp_path / "script.so").write_text("INPUT(libz.so)\n")
    (tmp_path / "empty.so").touch()
    (tmp_path / "link.so").symlink_to(library)
    assert list(elf.elf_files(tmp_path)) == [library]


def test_a_stripped_library_still_works(library: Path) -> None:
    """Symbol and section tables go; the loader does not miss them."""
    before = library.stat().st_size
    saved = elf.strip(library)
    assert saved > 0
    assert library.stat().st_size == before - saved
    assert elf.strip(library) == 0
    assert ctypes.CDLL(str(library)).zlibVersion() != 0
    assert elf.needed(library) == ["libc.so.6"]


def test_libraries_inside_the_build_are_not_asked_of_the_host(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wheel brings along satisfies the others; what none brings is listed with its user."""
    monkeypatch.setattr(seal, "ALWAYS_THERE", set())
    assert seal.libraries_needed(tmp_path) == {"libc.so.6": ["libz.so"]}
    shutil.copy(library, tmp_path / "libc.so.6")
    assert seal.libraries_needed(tmp_path) == {}


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    """A list that no longer fits the lock is noticed at the build, not in the size of a host."""
    with pytest.raises(SystemExit, match="nothing matches torch/test"):
        prune.drop(tmp_path, "torch/test")


def test_what_is_dropped_is_dropped_whole(tmp_path: Path) -> None:
    """Folders go with their content, and neighbours stay."""
    (tmp_path / "torch" / "test").mkdir(parents=True)
    (tmp_path / "torch" / "test" / "big").write_text("x")
    (tmp_path / "torch" / "kept").write_text("x")
    prune.drop(tmp_path, "torch/test")
    assert [path.name for path in (tmp_path / "torch").iterdir()] == ["kept"]


@pytest.mark.parametrize("has_compiler", [False, True])
def test_the_kernels_are_compiled_where_a_compiler_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_compiler: bool
) -> None:
    """It is installed apart from the environment, checked by hash, and named to the wheel."""
    (tmp_path / "pip-26-py3-none-any.whl").touch()
    commands: list[list[str]] = []

    def run(_pip: Path, verb: str, *arguments: str | Path) -> None:
        commands.append([verb, *map(str, arguments)])
        if "--target" in commands[-1]:
            nvcc = Path(commands[-1][-1], "nvidia/cu13/bin/nvcc")
            nvcc.parent.mkdir(parents=True)
            nvcc.touch()
        if verb == "wheel":
            (tmp_path / "kernels-wheel").mkdir()
            (tmp_path / "kernels-wheel/made.whl").touch()

    monkeypatch.setattr(install, "run", run)
    given = [f"--wheels={tmp_path}", "--lock=lock", f"--kernels={tmp_path}/kernels"]
    given += [f"--compiler={tmp_path}/compiler"] if has_compiler else []
    monkeypatch.setattr(sys, "argv", ["install.py", *given])
    install.main()
    (making,) = [command for command in commands if command[0] == "wheel"]
    (lock,) = [command for command in commands if command[1:2] == ["--require-hashes"]][
        has_compiler:
    ]
    assert lock[:2] == ["install", "--require-hashes"]
    apart = tmp_path / "compiler-unpacked"
    assert (f"nvcc={apart}/nvidia/cu13/bin/nvcc" in making) is has_compiler
    assert (str(tmp_path / "kernels/nvcc.lock") in lock) is has_compiler
    assert (str(apart) in lock) is has_compiler


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """An artifact as pack.py makes it, under builds/ on a host."""
    build = tmp_path / "made" / "0123456789abcdef"
    build.mkdir(parents=True)
    (build / "build.json").write_text("{}\n")
    (build / "bin").mkdir(mode=0o555)
    made = tmp_path / "builds" / ".0123456789abcdef.tar.zst"
    run("pack.py", f"--build={build}", f"--to={made}", "--level=1")
    return made


def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run one of the programs, as a host would."""
    return subprocess.run(
        [sys.executable, FILES / name, *arguments], capture_output=True, text=True, check=False
    )


def receive(artifact: Path, sha256: str) -> "subprocess.CompletedProcess[str]":
    """Receive the artifact."""
    to = artifact.with_name("0123456789abcdef")
    return run("receive.py", f"--artifact={artifact}", f"--sha256={sha256}", f"--to={to}")


def checksum(artifact: Path) -> str:
    """The checksum that lies beside it."""
    return artifact.with_name(f"{artifact.name}.sha256").read_text().split()[0]


def left(artifact: Path) -> list[str]:
    """What lies among the builds, but for the checksum."""
    return sorted(p.name for p in artifact.parent.iterdir() if p.suffix != ".sha256")


def test_the_same_tree_packs_to_the_same_bytes(artifact: Path, tmp_path: Path) -> None:
    """Times and the place of the artifact do not enter."""
    build = tmp_path / "made" / "0123456789abcdef"
    (build / "build.json").touch()
    again = tmp_path / "again.tar.zst"
    run("pack.py", f"--build={build}", f"--to={again}", "--level=1")
    assert again.read_bytes() == artifact.read_bytes()
    assert checksum(again) == hashlib.sha256(again.read_bytes()).hexdigest()


def test_a_whole_artifact_becomes_a_build(artifact: Path) -> None:
    """The build lies under its name, with its modes, and the artifact is gone."""
    done = receive(artifact, checksum(artifact))
    assert done.returncode == 0, done.stderr
    assert left(artifact) == ["0123456789abcdef"]
    build = artifact.with_name("0123456789abcdef")
    assert (build / "build.json").read_text() == "{}\n"
    assert (build / "bin").stat().st_mode & 0o777 == 0o555


def test_a_wrong_checksum_leaves_nothing(artifact: Path) -> None:
    """One sentence, nothing unpacked, the artifact removed."""
    done = receive(artifact, "0" * 64)
    assert done.returncode == 1
    assert "should be 0000" in done.stdout
    assert done.stdout.count("\n") == 1
    assert left(artifact) == []


def test_half_an_artifact_leaves_nothing(artifact: Path) -> None:
    """An artifact that was cut before it was hashed fails in unpacking, and nothing stays."""
    artifact.write_bytes(artifact.read_bytes()[:-20])
    done = receive(artifact, hashlib.sha256(artifact.read_bytes()).hexdigest())
    assert done.returncode == 1
    assert "could not be unpacked" in done.stdout
    assert left(artifact) == []


def test_two_runs_at_once_unpack_a_build_once(artifact: Path) -> None:
    """Neither fails for the other, and none takes half of what the other unpacks for whole."""
    sha256 = checksum(artifact)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: receive(artifact, sha256), range(2)))
    assert [one.returncode for one in done] == [0, 0], done
    assert left(artifact) == ["0123456789abcdef"]


def test_an_artifact_that_is_gone_is_one_sentence(artifact: Path) -> None:
    """Another run has failed on it, and has taken it away."""
    sha256 = checksum(artifact)
    artifact.unlink()
    done = receive(artifact, sha256)
    assert done.returncode == 1
    assert done.stdout.startswith("Another run took the artifact away")
    assert not done.stderr
