"""Who imports whom, and who loads torch: docs/architecture.md's rules, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tidemill
from tidemill.supervisor.child import MAINS

PACKAGE = Path(tidemill.__file__).parent

# What each folder may import of tidemill besides itself and the modules in COMMON.
ALLOWED: dict[str, set[str]] = {
    "wire": set(),
    "ops": {"wire"},
    "models": {"ops", "wire"},
    "runner": {"models", "ops", "wire"},
    "scheduler": {"wire"},
    "text": {"wire"},
    "api": {"wire"},
    "supervisor": {"wire"},
}
# Modules beside the folders that all may import. They import no folder but wire themselves.
COMMON = {"config", "hub", "gguf_file"}
TORCH = {"runner", "models", "ops"}


def imports(path: Path) -> set[str]:
    """Absolute names of all that a file imports, at the top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from tidemill.wire import messages` names a module, `… import encode` does not.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def of_tidemill(path: Path) -> set[str]:
    """The folders and top-level modules of tidemill that a file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("tidemill.")}


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_point_one_way(folder: str) -> None:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    for path in files:
        wrong = of_tidemill(path) - ALLOWED[folder] - COMMON - {folder}
        assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}"


def test_common_modules_depend_on_no_process() -> None:
    for path in PACKAGE.glob("*.py"):
        if path.stem in COMMON:
            wrong = of_tidemill(path) - {"wire"} - COMMON
            assert not wrong, f"{path.name} imports {sorted(wrong)}"


def test_only_the_runners_side_names_torch() -> None:
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parts[0]
        if folder not in TORCH:
            named = {name.split(".")[0] for name in imports(path)}
            assert "torch" not in named, f"{path.relative_to(PACKAGE)} imports torch"


@pytest.mark.parametrize(
    "module",
    [
        "tidemill",
        "tidemill.cli",
        "tidemill.supervisor.supervisor",
        *(module for role, module in MAINS.items() if role != "runner"),
    ],
)
def test_no_process_but_the_runners_loads_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_every_role_has_a_main_with_the_same_signature() -> None:
    """The table names modules by text: this is what finds a wrong name before a user does."""
    for role, module in MAINS.items():
        path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        functions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        (main,) = [f for f in functions if f.name == "main"]
        assert [a.arg for a in main.args.args] == ["config", "index"], role
