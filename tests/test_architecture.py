"""The invariants of ARCHITECTURE.md that a machine can check; most say what must be absent."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent
CEXT = ROOT / "cext"
SPEC = CEXT / "spec"
SERVICE = ROOT / "service" / "drafthouse_server"
BENCH = ROOT / "bench" / "drafthouse_bench"
PACKAGES = (SERVICE, CEXT / "drafthouse_engine", ROOT / "clients" / "python" / "drafthouse")
GRPC_MODULES = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google"}
DISTRIBUTIONS = {
    "grpc": "grpcio", "grpc_health": "grpcio-health-checking", "grpc_status": "grpcio-status",
    "grpc_reflection": "grpcio-reflection",
}  # fmt: skip
"""What installs a module of another name."""
PURE_FOLDERS = ("scheduling", "drafting")
PURE_FILES = (
    SERVICE / "step.py", SERVICE / "errors.py",
    *(
        SERVICE / "tenancy" / f"{name}.py"
        for name in ("fairness", "identity", "limits", "tenants")
    ),
)  # fmt: skip
"""Those beside the pure folders."""
N_FILES_MAX = 12
"""Python files of a folder, without `__init__.py`."""
IMPURE_MODULES = {
    "asyncio", "concurrent", "datetime", "grpc", "io", "multiprocessing", "os", "pathlib", "queue",
    "random", "secrets", "selectors", "socket", "subprocess", "threading", "time", "uuid",
}  # fmt: skip
CATCH_ALL_FILES = {"rpc/interceptors.py", "serving/engine_thread.py", "drafting/guard.py"}
TEXT_SUFFIXES = {
    ".c", ".cfg", ".cpp", ".h", ".hpp", ".lock", ".md", ".proto", ".pxd", ".pxi", ".py", ".pyi",
    ".pyx", ".sh", ".toml", ".ts", ".txt", ".yaml", ".yml",
}  # fmt: skip
# Split, so that this file does not find itself.
MACHINE_PATHS = re.compile("/" + "(work|root|opt/wheels|opt/pypi[a-z-]*|home/[a-z]+|tmp/[a-z]+)/")
REGISTRY_HOSTS = re.compile(r"(pypi|pythonhosted|npmjs|deb\.debian|crates)" + r"\.(org|io|com)")


def sources(package: Path) -> list[Path]:
    """Returns the Python files of a package, without the generated ones."""
    return sorted(path for path in package.rglob("*.py") if "_pb2" not in path.name)


def all_sources() -> list[Path]:
    return [path for package in PACKAGES for path in sources(package)]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imported(path: Path) -> set[str]:
    """Returns the dotted names of all modules that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def distribution(module: str) -> str:
    """Returns what a module is installed by, as pyproject.toml calls it; nothing for our own."""
    root = module.split(".", maxsplit=1)[0]
    if root in {*sys.stdlib_module_names, "_typeshed"} or root.startswith("drafthouse"):
        return ""
    if root == "google":
        return "protobuf" if module.startswith("google.protobuf") else "googleapis-common-protos"
    return DISTRIBUTIONS.get(root, root)


def declared(pyproject: Path) -> set[str]:
    """Returns what a project needs, its extras too, without versions."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    wanted = [*project["dependencies"], *(name for extra in extras for name in extra)]
    return {re.split(r"[^\w-]", name)[0] for name in wanted}


def exported(path: Path) -> list[str] | None:
    """Returns a file's `__all__`, or None where it has none."""
    for node in parse(path).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            value = getattr(node, "value", None)
            assert value is not None
            names = ast.literal_eval(value)
            return [str(name) for name in names]
    return None


def sort_key(name: str) -> tuple[int, str]:
    """Ruff's order: constants, classes, the rest."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name


@pytest.mark.parametrize(
    ("folder", "package"),
    [("", "service/drafthouse_server"), ("clients/python", "clients/python/drafthouse")],
)
def test_what_is_imported_is_declared(folder: str, package: str) -> None:
    """The server took google.rpc as the SDK brings it: older than what it uses of it."""
    files = (ROOT / package).rglob("*.py")
    found = {distribution(name) for path in files for name in imported(path)} - {""}
    assert found - declared(ROOT / folder / "pyproject.toml") == set()


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run(
        [lint, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_exports_are_sorted_and_complete(package: Path) -> None:
    init = package / "__init__.py"
    names = exported(init)
    assert names is not None, f"{package.name} lists no __all__"
    assert names == sorted(names, key=sort_key)
    bound = set()
    for node in parse(init).body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
    public = {name for name in bound if not name.startswith("_")}
    assert public <= set(names), f"not in __all__: {sorted(public - set(names))}"


def test_every_package_says_that_it_is_typed() -> None:
    assert [p.name for p in PACKAGES if not (p / "py.typed").exists()] == []


def test_module_exports_are_sorted_and_name_every_public_definition() -> None:
    wrong = []
    for path in all_sources():
        names = exported(path)
        if names is None:
            continue
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        defined = {node.name for node in parse(path).body if isinstance(node, kinds)}
        missing = {name for name in defined if not name.startswith("_")} - set(names)
        if names != sorted(names, key=sort_key) or missing:
            wrong.append(f"{path.relative_to(ROOT)}: missing {sorted(missing)} or unsorted")
    assert not wrong, "\n".join(wrong)


def within(path: Path) -> str:
    """Returns a file's path inside the service."""
    return str(path.relative_to(SERVICE))


def users_of(modules: set[str]) -> set[str]:
    """Returns the folders of the service in which a file imports one of the modules."""
    return {within(path.parent) for path in sources(SERVICE) if imported(path) & modules}


def test_folders_are_flat_and_hold_a_dozen_files() -> None:
    # A revision of the store's schema is a file, and stays one for ever.
    folders = {path.parent for path in sources(SERVICE)} - {SERVICE / "tenancy" / "migrations"}
    assert {folder.parent for folder in folders} <= {SERVICE, SERVICE.parent}
    crowded = {
        within(folder): len(files)
        for folder in folders
        if len(files := [path for path in folder.glob("*.py") if path.stem != "__init__"])
        > N_FILES_MAX
    }
    assert not crowded


N_LINES_OF_FILE, N_LINES_OF_CLASS, N_ATTRIBUTES = 600, 400, 20
FLAT_RECORDS = {
    "Config": "settings: a file, the environment and flags name them without a group",
    "DeviceSettings": "settings, of which `Config` is made",
    "FrontSettings": "settings, of which `Config` is made",
    "SamplingOptions": "the fields of the message of that name, one for one",
    "Statistics": "counts at one moment, each of them a metric",
    "Metrics": "what these are read from",
}
"""Classes that have more attributes, because what they hold has no parts; and why it has none."""


def attributes(node: ast.ClassDef) -> set[str]:
    """Returns the names that a class's methods assign on `self`, and a dataclass's fields."""
    found = set()
    for part in ast.walk(node):
        is_stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if is_stored and ast.unparse(part).startswith("self."):
            found.add(ast.unparse(part).split(".")[1])
    if is_dataclass(node):
        fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
        found |= {field.id for field in fields if isinstance(field, ast.Name)}
    return found


def test_no_file_and_no_class_of_the_service_is_too_large() -> None:
    large, flat = [], set()
    for path in sources(SERVICE):
        n_lines = path.read_text(encoding="utf-8").count("\n")
        if n_lines > N_LINES_OF_FILE:
            large.append(f"{within(path)}: {n_lines} lines")
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            n_of_class = (node.end_lineno or 0) - node.lineno + 1
            n_attributes = len(attributes(node))
            if n_attributes > N_ATTRIBUTES and node.name in FLAT_RECORDS:
                flat.add(node.name)
                n_attributes = 0
            if n_of_class > N_LINES_OF_CLASS or n_attributes > N_ATTRIBUTES:
                large.append(f"{within(path)}: {node.name}, {n_of_class} lines, {n_attributes}")
    assert not large, "\n".join(large)
    assert flat == FLAT_RECORDS.keys()


def test_only_engine_imports_the_extension() -> None:
    assert users_of({"drafthouse_engine"}) == {"engine"}


def test_only_rpc_knows_grpc_and_protobuf() -> None:
    users = {within(path.parent) for path in sources(SERVICE) if roots(path) & GRPC_MODULES}
    assert users == {"rpc"}
    assert users_of({"drafthouse.v1"}) == {"rpc"}


def test_only_the_loop_has_a_scheduler() -> None:
    """What the event loop knows of it, it knows from reports: no other file can call it."""
    scheduler = "drafthouse_server.scheduling.scheduler"
    users = {within(path) for path in sources(SERVICE) if scheduler in imported(path)}
    assert users == {f"serving/{name}.py" for name in ("compose", "engine_thread", "loop")}


def test_of_the_sdk_the_service_has_the_stubs_and_the_command_line_the_client() -> None:
    users = {within(path.parent) for path in sources(SERVICE) if "drafthouse" in roots(path)}
    assert users == {"rpc", "cli"}


def test_a_sequence_is_imported_by_its_one_name() -> None:
    """It alone is called `Sequence` there: that of `collections.abc` has another name beside it."""
    found = [
        f"{path}: {alias.name} as {alias.asname}"
        for path in [*sources(SERVICE), *sources(BENCH), *(ROOT / "tests").rglob("*.py")]
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom)
        and node.module == "drafthouse_server.scheduling.sequence"
        for alias in node.names
        if alias.asname
    ]
    assert not found


def pure_sources() -> list[Path]:
    """Returns the files without clock, chance, input and output."""
    return [path for name in PURE_FOLDERS for path in sources(SERVICE / name)] + [*PURE_FILES]


@pytest.mark.parametrize("path", pure_sources(), ids=within)
def test_pure_files_have_no_clock_no_chance_no_io_no_async(path: Path) -> None:
    assert not roots(path) & IMPURE_MODULES
    assert "numpy.random" not in imported(path)
    kinds = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node.lineno for node in ast.walk(parse(path)) if isinstance(node, kinds)]
    names = {node.id for node in ast.walk(parse(path)) if isinstance(node, ast.Name)}
    assert not names & {"open", "print", "input"}


def test_no_test_imports_a_benchmark_but_its_own() -> None:
    tests = ROOT / "tests"
    users = {
        path.relative_to(tests).parts[0]
        for path in tests.rglob("*.py")
        if "drafthouse_bench" in roots(path)
    }
    assert users == {"bench"}


FORKS = {"preexec_fn", "user", "group", "extra_groups"}
"""With these `subprocess` forks; without them a child shares this process's memory until it is
another program, and no library notices."""


def test_no_process_is_forked() -> None:
    """In a fork gRPC begins its threads anew, which then read what is not theirs, and abort."""
    others = {*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").glob("*.py")}
    found = [
        f"{path}:{node.lineno}"
        for path in {*all_sources(), *others}
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and is_fork(node)
    ]
    assert not found


def is_fork(call: ast.Call) -> bool:
    name, _, last = ast.unparse(call.func).rpartition(".")
    if name == "subprocess":
        return bool(FORKS & {keyword.arg for keyword in call.keywords})
    return name in {"os", "pty"} and last in {"fork", "forkpty"}


def test_nobody_waits_by_wait_for() -> None:
    """Under Python 3.11 it loses a cancellation that comes when what it waits for is just done.

    A task whose end is waited for then goes on for ever; `asyncio.timeout` does not.
    """
    found = [
        f"{path}:{node.lineno}"
        for path in all_sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    ]
    assert not found


def test_every_exception_is_caught_in_three_files_only() -> None:
    users = {within(path) for path in sources(SERVICE) if catches_all(path)}
    assert users == CATCH_ALL_FILES


def catches_all(path: Path) -> bool:
    handlers = [node for node in ast.walk(parse(path)) if isinstance(node, ast.ExceptHandler)]
    names = {node.type.id for node in handlers if isinstance(node.type, ast.Name)}
    return bool(names & {"Exception", "BaseException"}) or any(not node.type for node in handlers)


def test_every_dataclass_field_is_documented() -> None:
    bare = [field for path in all_sources() for field in undocumented_fields(path)]
    assert not bare, "\n".join(bare)


def undocumented_fields(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if not is_public_dataclass(node):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            is_documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not is_documented and not field.target.id.startswith("_"):
                yield f"{path.relative_to(ROOT)}: {node.name}.{field.target.id}"


def is_public_dataclass(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
        return False
    return is_dataclass(node)


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def without_comments(path: Path) -> str:
    """Returns C source without comments and string literals."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", text, flags=re.DOTALL)


def included_by(path: Path) -> set[str]:
    """Returns what a C or C++ file, or a Cython file that embeds such text, includes."""
    text = path.read_text(encoding="utf-8")
    return set(re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', text))


def native_files() -> list[Path]:
    suffixes = {".c", ".cpp", ".h", ".hpp", ".pxd", ".pxi", ".pyx"}
    return sorted(path for path in CEXT.rglob("*") if path.suffix in suffixes)


def test_only_the_folder_spec_includes_llama_cpp() -> None:
    upstream = r"(.*/)?(llama|ggml|gguf|common|sampling|speculative|chat|log|unicode)\b"
    private = r"(.*/)?internal\.hpp$"
    for wanted in (upstream, private):
        users = {p for p in native_files() if any(re.match(wanted, it) for it in included_by(p))}
        assert {path.parent for path in users} == {SPEC}


def test_two_files_include_the_internals_of_llama_cpp() -> None:
    """A new llama.cpp may change its `src/` at will: what we take of it stands in one place."""
    public = {"llama.h", "llama-cpp.h", "sys/mman.h"}
    users = {
        path.name
        for path in native_files()
        for name in included_by(path) - public
        if "/" in name or name.startswith(("llama", "unicode"))
    }
    assert users == {"grammar.cpp", "masks.cpp", "upstream.cpp"}


def test_no_cpp_file_is_longer_than_800_lines() -> None:
    """`spec.h` is C, and longer: the boundary that callers include stays whole (DESIGN, §1)."""
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in (*native_files(), *ROOT.glob("tests/**/*.[ch]pp"))
        if path.suffix in {".cpp", ".hpp"}
    }
    assert lengths.keys() >= {"internal.hpp", "plan_fuzz.cpp"}
    assert not {name: n for name, n in lengths.items() if n > 800}


def test_cython_sees_our_own_headers_alone() -> None:
    headers = {
        name
        for path in (CEXT / "drafthouse_engine").rglob("*.p[xy][dxi]")
        for name in re.findall(r'extern\s+from\s+"([^"]+)"', path.read_text(encoding="utf-8"))
    }
    assert headers
    assert headers <= {path.name for path in CEXT.glob("*.h")} | {"Python.h"}


@pytest.mark.parametrize("header", sorted(CEXT.glob("*.h")), ids=lambda header: header.name)
def test_no_type_of_llama_cpp_crosses_our_headers(header: Path) -> None:
    foreign = re.findall(r"\b(?:llama|ggml|gguf|common)_\w+", without_comments(header))
    assert not foreign
    assert "std::" not in without_comments(header)


def files() -> Iterator[Path]:
    """Yields what is, or could be, committed."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    run = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        assert not os.environ.get("CI"), f"these tests ask git: {run.stderr}"
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in filter(None, run.stdout.split("\0")))
    yield from (path for path in paths if path.is_file())


def text_files() -> Iterator[Path]:
    """Yields those of them that are text."""
    named = {"Makefile", "Dockerfile", "run", ".gitignore", ".clang-format"}
    yield from (it for it in files() if it.suffix in TEXT_SUFFIXES or it.name in named)


def test_nothing_that_is_compiled_is_committed() -> None:
    found = []
    for path in files():
        with path.open("rb") as file:
            if file.read(8).startswith((b"\x7fELF", b"!<arch>\n")):
                found.append(str(path.relative_to(ROOT)))
    assert not found


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if MACHINE_PATHS.search(line) or REGISTRY_HOSTS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_conftest_names_files_that_are_there() -> None:
    text = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    named = re.findall(r'"(tests/[a-z_/]+\.py)"', text)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_name_files_that_are_there() -> None:
    paths = [path.relative_to(ROOT) for path in text_files()]
    ends = {"/".join(path.parts[i:]) for path in paths for i in range(len(path.parts))}
    of_llama_cpp = {"common/speculative.cpp", "ops.cpp", "repack.cpp", "tiled.cpp"}
    found = []
    for path in (path for path in paths if path.suffix == ".md"):
        if path.name == "CHANGELOG.md" or "results" in path.parts:
            continue  # they tell what was
        text = (ROOT / path).read_text("utf-8")
        named = re.findall(r"`(?:python )?([\w./]+\.(?:py|pyx|pxi|cpp|hpp|sh|md))`", text)
        found += [f"{path}: {name}" for name in named if name not in ends | of_llama_cpp]
    assert not found, "\n".join(found)
