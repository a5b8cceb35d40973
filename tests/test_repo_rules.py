"""The tree keeps its own rules: who imports whom, how long things are, what is named, documented and pinned.

Each rule is a function from a root folder to its findings. It must find nothing in this repository (the control) and
must flag a small tree that breaks it (the teeth), so a rule that went blind fails here.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGES = ("cute_kernels", "replayssm", "tuning")
COMPILER = {"cutlass", "cuda", "tvm_ffi"}
# What the host plans with: these modules of cute_kernels need no compiler, so replayssm may import them at once.
PLANNING = tuple(
    f"cute_kernels.{name}" for name in ("arch", "configs", "copy_shape", "draft_shape", "heuristic", "operands")
)
# Within cute_kernels a module imports from its own layer or a lower one. The operations (step, commit, ...) come last.
FOUNDATION = {"arch", "args", "compile", "configs", "copy_shape", "draft_shape", "dtypes", "operands"}
LAYERS = ("primitives", "replay", "recurrences")
SSM_WORDS = re.compile(r"ssm|mamba|\bgdn|\bkda|delta_?net|replay|recurren|checkpoint|cursor|draft|decay", re.I)
LAYER_WORDS = re.compile(r"mamba|\bgdn|\bkda|delta_?net|kimi|qwen|nemotron", re.I)
REFERENCE_MAY_IMPORT = (["inputs"], ["spec"], ["pool"], ["cursors"], ["reference"])
MAX_HOST_FILE, MAX_DEVICE_FILE, MAX_TEST_FILE = 400, 600, 700
MAX_FUNCTION, MAX_KERNEL, MAX_PARAMETERS = 80, 200, 9
VERSION_WORD = re.compile(r"(?:^|[_.-])(?:v\d+|new|old|wip|tmp)(?:[_.-]|$)", re.I)
# Split so that this file does not name what it looks for.
MACHINE_TEXT = re.compile(
    r"(?<![\w.~])/(?:work|root|home|opt|tmp|mnt)/\w|pypi\.(?:org|python)|pythonhosted\.|registry\.npm|download\.pytorch"
)
NAMED_PATH = re.compile(r"(?<![\w/.-])(?:(?:cute_kernels|replayssm|tuning|tests|docs|\.ci)/[\w./*-]*\w|[A-Z]{5,}\.md)")
NAMED_TEST = re.compile(r"([\w./-]+\.py)::(\w+)")
NAMED_MODULE = re.compile(r"python3? -m ((?:replayssm|tuning)[\w.]*)")
Rule = Callable[[Path], Iterator[str]]


def tracked(root: Path, *patterns: str) -> list[Path]:
    """Files that git has or would add; without git, all but hidden and generated ones."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True) if (root / ".git").exists() else None
    if listed and listed.returncode == 0:
        paths = [root / name for name in listed.stdout.split("\0") if name]
    else:
        hidden = re.compile(r"/\.(?!ci/|pre-commit|gitignore)|/__pycache__/|/build/|\.egg-info/")
        paths = [path for path in root.rglob("*") if not hidden.search("/" + path.relative_to(root).as_posix())]
    return sorted(path for path in paths if path.is_file() and any(path.match(one) for one in patterns or "*"))


def sources(root: Path, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Path within the root and syntax tree of each Python file under the folders."""
    for path in tracked(root, "*.py"):
        name = path.relative_to(root).as_posix()
        if name.startswith(tuple(f"{folder}/" for folder in folders)):
            yield name, ast.parse(path.read_text(encoding="utf-8"), name)


def imports(tree: ast.AST, *, eager: bool = False) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import; with `eager`, only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif not (eager and _runs_later(node)):
            yield from imports(node, eager=eager)


def _runs_later(node: ast.AST) -> bool:
    typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    return typing_only or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def top(name: str) -> str:
    return name.partition(".")[0]


def layer_of(dotted: str) -> int:
    """Rank of a module of cute_kernels, named with or without the package."""
    part = dotted.removeprefix("cute_kernels.").partition(".")[0]
    return 0 if part in FOUNDATION else 1 + LAYERS.index(part) if part in LAYERS else 1 + len(LAYERS)


def import_directions(root: Path) -> Iterator[str]:
    for name, tree in sources(root, *PACKAGES):
        package = name.split("/")[0]
        for line, target in imports(tree):
            if target.startswith("."):
                yield f"{name}:{line} imports {target} relatively; name the package"
            if package != "tuning" and top(target) == "tuning":
                yield f"{name}:{line} imports tuning"
            if package == "cute_kernels" and top(target) in ("replayssm", "transformers"):
                yield f"{name}:{line} device code imports {target}"


def device_layers(root: Path) -> Iterator[str]:
    for name, tree in sources(root, "cute_kernels"):
        here = layer_of(name.removeprefix("cute_kernels/").removesuffix(".py").replace("/", "."))
        for line, target in imports(tree):
            if target.startswith("cute_kernels.") and layer_of(target) > here:
                yield f"{name}:{line} imports {target} from a layer above"


def lazy_imports(root: Path) -> Iterator[str]:
    for name, tree in sources(root, "replayssm", "cute_kernels"):
        if name.startswith("cute_kernels/") and name.removesuffix(".py").replace("/", ".") not in PLANNING:
            continue
        integration, reference = (name.startswith(f"replayssm/{part}/") for part in ("integrations", "reference"))
        for line, target in imports(tree, eager=True):
            if top(target) in COMPILER or (top(target) == "cute_kernels" and not target.startswith(PLANNING)):
                yield f"{name}:{line} imports {target} outside a function"
            if integration and top(target) not in {"torch", "replayssm", *sys.stdlib_module_names}:
                yield f"{name}:{line} imports its host {target} outside a function"
        for line, target in imports(tree) if reference else ():
            beyond = top(target) == "replayssm" and target.split(".")[1:2] not in REFERENCE_MAY_IMPORT
            if beyond or top(target) not in {"torch", "replayssm", *sys.stdlib_module_names}:
                yield f"{name}:{line} the reference imports {target}"


def words_of_layers(root: Path) -> Iterator[str]:
    for folder, words in (("primitives", SSM_WORDS), ("replay", LAYER_WORDS)):
        for path in tracked(root, f"cute_kernels/{folder}/*.py"):
            for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if found := words.search(text):
                    yield f"{path.relative_to(root)}:{number} says {found.group()!r}, which belongs to a layer above"


def one_compiler(root: Path) -> Iterator[str]:
    for name, tree in sources(root, *PACKAGES):
        for node in ast.walk(tree):
            direct = isinstance(node, ast.Attribute) and ast.unparse(node) in ("cute.compile", "cutlass.cute.compile")
            named = isinstance(node, ast.ImportFrom) and node.module == "cutlass.cute"
            used = direct or (named and any(alias.name == "compile" for alias in node.names))
            if used and name != "cute_kernels/compile.py":
                yield f"{name}:{node.lineno} uses cute.compile; only cute_kernels/compile.py may"


def _decorators(node: ast.AST) -> set[str]:
    return {ast.unparse(d).partition("(")[0] for d in getattr(node, "decorator_list", ())}


def _is_device(name: str, tree: ast.Module) -> bool:
    decorated = any(_decorators(node) & {"cute.kernel", "cute.jit"} for node in ast.walk(tree))
    return decorated or name.startswith(tuple(f"cute_kernels/{layer}/" for layer in LAYERS))


def file_lengths(root: Path) -> Iterator[str]:
    for name, tree in sources(root, *PACKAGES, "tests"):
        lines = len((root / name).read_text(encoding="utf-8").splitlines())
        device = name.startswith("cute_kernels/") and _is_device(name, tree)
        limit = MAX_TEST_FILE if name.startswith("tests/") else MAX_DEVICE_FILE if device else MAX_HOST_FILE
        if lines > limit:
            yield f"{name} has {lines} lines, at most {limit}"


def function_sizes(root: Path) -> Iterator[str]:
    for name, tree in sources(root, *PACKAGES, "tests"):
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            start, end = node.lineno, node.end_lineno or node.lineno
            first = node.body[0]
            documented = ast.get_docstring(node) is not None
            lines = end - start + 1 - ((first.end_lineno or 0) - first.lineno + 1 if documented else 0)
            limit = MAX_KERNEL if "cute.kernel" in _decorators(node) else MAX_FUNCTION
            if lines > limit:
                yield f"{name}:{start} {node.name} has {lines} lines without its docstring, at most {limit}"
            parameters = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len(parameters) - (parameters[:1] in (["self"], ["cls"]))
            if count > MAX_PARAMETERS:
                yield f"{name}:{start} {node.name} has {count} parameters, at most {MAX_PARAMETERS}"


def file_names(root: Path) -> Iterator[str]:
    for path in tracked(root):
        name = path.relative_to(root).as_posix()
        if path.stem in ("utils", "util", "misc"):
            yield f"{name}: a file is named after what it does"
        if any(VERSION_WORD.search(part) for part in (*path.relative_to(root).parts[:-1], path.stem)):
            yield f"{name}: no version words in file names"


def docstrings(root: Path) -> Iterator[str]:
    for name, tree in sources(root, "replayssm"):
        for node in tree.body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                yield f"{name}:{node.lineno} {node.name} has no docstring"


def claims_of_tests(root: Path) -> Iterator[str]:
    for name, tree in sources(root, "tests"):
        if Path(name).name.startswith("test_") and len((ast.get_docstring(tree) or "").split()) < 5:
            yield f"{name} does not open with a sentence that says what it claims"


def paths_in_docs(root: Path) -> Iterator[str]:
    for doc in tracked(root, "*.md"):
        text = doc.read_text(encoding="utf-8")
        for module in {match.replace(".", "/") for match in NAMED_MODULE.findall(text)}:
            if not any((root / (module + end)).exists() for end in (".py", "/__main__.py")):
                yield f"{doc.relative_to(root)} runs module {module}, which does not exist"
        links = {target for target in re.findall(r"\]\(([\w./-]+)\)", text) if not (doc.parent / target).exists()}
        named = {path for path in NAMED_PATH.findall(text) if not any(root.glob(path))}
        yield from (f"{doc.relative_to(root)} names {path}, which does not exist" for path in sorted(links | named))


def named_tests(root: Path) -> Iterator[str]:
    for doc in tracked(root, "*.md"):
        for name, function in NAMED_TEST.findall(doc.read_text(encoding="utf-8")):
            path = root / name
            body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
            tests = {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
            if function not in tests:
                yield f"{doc.relative_to(root)} names test {name}::{function}, which does not exist"


def machine_text(root: Path) -> Iterator[str]:
    for path in tracked(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if found := MACHINE_TEXT.search(line):
                yield f"{path.relative_to(root)}:{number} names a machine's path or a registry: {found.group()!r}"


def records_parse(root: Path) -> Iterator[str]:
    for path in tracked(root, "*.json"):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            yield f"{path.relative_to(root)}: {error}"


def pins_agree(root: Path) -> Iterator[str]:
    pinned = [
        dict(re.findall(r'"(ruff|mypy)==([\w.]+)"', (root / name).read_text(encoding="utf-8")))
        for name in ("pyproject.toml", ".pre-commit-config.yaml")
    ]
    if pinned[0] != pinned[1] or set(pinned[0]) != {"ruff", "mypy"}:
        yield f"pyproject.toml pins {pinned[0]}, .pre-commit-config.yaml {pinned[1]}"


def imports_without_compiler(root: Path) -> Iterator[str]:
    """Import every module of replayssm in a process that has neither the compiler, CUDA nor the integrations' hosts."""
    blocked = sorted(COMPILER | {"transformers", "vllm", "flashinfer", "tuning"})
    script = (
        "import importlib, pkgutil, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked}))\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "import replayssm\n"
        "for module in pkgutil.walk_packages(replayssm.__path__, 'replayssm.'):\n"
        "    importlib.import_module(module.name)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    if ran.returncode:
        yield "replayssm: " + ran.stderr.strip().splitlines()[-1]


KERNEL = "import cutlass.cute as cute\n\n\n@cute.kernel\ndef kernel():\n"
BODY = "    x = 1\n"
NINE = ", ".join(f"p{i}" for i in range(9))
# Rule, a tree that breaks it, and a part of each finding that must come out, no more and no fewer.
RULES: list[tuple[Rule, dict[str, str], list[str]]] = [
    (
        import_directions,
        {
            "cute_kernels/step.py": "def f():\n    import replayssm.pool\n",
            "replayssm/plan.py": "def f():\n    from tuning import roofline\n",
            "replayssm/ops.py": "from . import plan\n",
            "tuning/bench.py": "import tuning.roofline, replayssm, cute_kernels.step\n",
        },
        ["device code imports replayssm.pool", "imports tuning", "relatively"],
    ),
    (
        device_layers,
        {
            "cute_kernels/primitives/copy.py": "from cute_kernels.replay import fold\nfrom cute_kernels import arch\n",
            "cute_kernels/replay/fold.py": "import cute_kernels.recurrences.base\nimport cute_kernels.arch\n",
            "cute_kernels/recurrences/gdn.py": "def f():\n    from cute_kernels.step import launch\n",
            "cute_kernels/configs.py": "from cute_kernels.primitives.copy import x\n",
            "cute_kernels/step.py": "from cute_kernels.recurrences.gdn import x\nfrom cute_kernels.commit import y\n",
        },
        ["cute_kernels.replay.fold", "recurrences.base", "step.launch", "primitives.copy.x"],
    ),
    (
        lazy_imports,
        {
            "replayssm/ops.py": "import cutlass\nfrom cute_kernels import step\n\n\ndef f():\n    import cutlass\n",
            "replayssm/plan.py": "from cute_kernels import arch\ntry:\n    import tvm_ffi\nfinally:\n    pass\n",
            "cute_kernels/configs.py": "import cute_kernels.arch, cuda\n",
            "cute_kernels/step.py": "import cutlass\n",
            "replayssm/args.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import cutlass\n",
            "replayssm/integrations/host.py": "import transformers\n\n\ndef f():\n    import transformers\n",
            "replayssm/reference/replay.py": "import math, torch\nfrom replayssm.spec import x\nimport numpy\n"
            "from replayssm.ops import step\n",
        },
        ["imports cutlass outside", "cute_kernels.step", "tvm_ffi", "host transformers", "numpy", "ops.step", "cuda"],
    ),
    (
        words_of_layers,
        {
            "cute_kernels/primitives/copy.py": "# copies a checkpoint\n# copies a tile\n",
            "cute_kernels/replay/fold.py": "MAMBA2 = 1\ncheckpoint = 2\n",
            "cute_kernels/recurrences/mamba2.py": "MAMBA2 = 1\n",
        },
        ["'checkpoint'", "'MAMBA'"],
    ),
    (
        one_compiler,
        {
            "cute_kernels/step.py": "import cutlass.cute as cute\n\nf = cute.compile[1](g)\n",
            "tuning/search.py": "from cutlass.cute import compile\n",
            "cute_kernels/compile.py": "import cutlass.cute as cute\n\nf = cute.compile(g)\n",
            "replayssm/ops.py": "import re\n\nf = re.compile('x')\n",
        },
        ["cute_kernels/step.py", "tuning/search.py"],
    ),
    (
        file_lengths,
        {
            "replayssm/pool.py": "x = 1\n" * (MAX_HOST_FILE + 1),
            "cute_kernels/step.py": KERNEL + BODY * MAX_DEVICE_FILE,
            "cute_kernels/replay/fold.py": "x = 1\n" * MAX_DEVICE_FILE,
            "tests/test_long.py": "x = 1\n" * (MAX_TEST_FILE + 1),
        },
        ["replayssm/pool.py", "cute_kernels/step.py", "tests/test_long.py"],
    ),
    (
        function_sizes,
        {
            "replayssm/ops.py": "def long():\n" + BODY * MAX_FUNCTION + f"\n\ndef wide({NINE}, *, x):\n    pass\n",
            "replayssm/pool.py": "class A:\n" + f"    def fits(self, {NINE}):\n" + ("    " + BODY) * (MAX_FUNCTION - 1),
            "cute_kernels/step.py": KERNEL.replace("kernel()", "long_kernel()") + BODY * MAX_KERNEL,
            "cute_kernels/commit.py": KERNEL + BODY * (MAX_KERNEL - 1),
            "replayssm/spec.py": 'def fits():\n    """\n' + "\n" * MAX_FUNCTION + '    """\n    return 1\n',
        },
        ["long has", "wide has 10", "long_kernel has"],
    ),
    (
        file_names,
        {"replayssm/utils.py": "", "replayssm/pool_v2.py": "", "docs/new/plan.md": "", "replayssm/mamba2.py": ""},
        ["utils.py", "pool_v2.py", "docs/new/plan.md"],
    ),
    (
        docstrings,
        {"replayssm/pool.py": 'def f():\n    """F."""\ndef g(): ...\nclass H: ...\ndef _i(): ...\n'},
        ["g has no", "H has no"],
    ),
    (
        claims_of_tests,
        {"tests/a/test_x.py": "x = 1\n", "tests/test_y.py": '"""Tests."""\n', "tests/helpers/cases.py": "x = 1\n"},
        ["test_x.py", "test_y.py"],
    ),
    (
        paths_in_docs,
        {
            "README.md": "See docs/gone.md, [it](gone.png), `replayssm/po*.py`, `python -m tuning`, CHANGELOG.md",
            "docs/use.md": "`python3 -m replayssm.demo` in [the pool](../replayssm/pool.py)",
            "replayssm/pool.py": "",
        },
        ["names CHANGELOG.md", "names docs/gone.md", "names gone.png", "module tuning", "module replayssm/demo"],
    ),
    (
        named_tests,
        {
            "docs/testing.md": "`tests/test_a.py::test_kept`, `tests/test_a.py::test_gone`, "
            "`tests/b/test_b.py::test_kept`, `test_b.py::test_kept`, `tests/test_a.py::helper`, "
            "`tests/test_a.py::test_inner`",
            "tests/test_a.py": "def test_kept(): ...\ndef helper(): ...\nclass A:\n    def test_inner(self): ...\n",
            "tests/b/test_b.py": "def test_kept(): ...\n",
        },
        ["tests/test_a.py::test_gone", " test_b.py::test_kept", "test_a.py::helper", "test_a.py::test_inner"],
    ),
    (
        machine_text,
        {
            "a.py": f"path = '{'/'.join(['', 'home', 'me'])}'\n",
            "b.toml": f"index = 'https://pypi{'.'}org'\n",
            "c": "a/tmp/b",
        },
        ["a.py:1", "b.toml:1"],
    ),
    (records_parse, {"replayssm/data/tuned/a.json": "{'a': 1}", "docs/b.json": '{"a": 1}'}, ["a.json"]),
    (
        pins_agree,
        {"pyproject.toml": '"ruff==1.0", "mypy==2.0"', ".pre-commit-config.yaml": '["ruff==1.0"]\n["mypy==2.1"]'},
        ["2.1"],
    ),
    (
        imports_without_compiler,
        {"replayssm/__init__.py": "", "replayssm/ops.py": "from cutlass import cute\n"},
        ["cutlass"],
    ),
]
each_rule = pytest.mark.parametrize(("rule", "tree", "expected"), RULES, ids=[case[0].__name__ for case in RULES])


@each_rule
def test_rule_holds_here(rule: Rule, tree: dict[str, str], expected: list[str], repository: Path) -> None:
    findings = list(rule(repository))
    assert not findings, "\n".join(findings)


@each_rule
def test_rule_has_teeth(rule: Rule, tree: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    findings = list(rule(tmp_path))
    assert len(findings) == len(expected), findings
    for part in expected:
        assert any(part in finding for finding in findings), (part, findings)
