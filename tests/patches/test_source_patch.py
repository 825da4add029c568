"""The source patch: what it means when the patched loaders run, and what it does to files."""

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from loadpeak.cli import build
from loadpeak_patches.source.rewrite import RELEASE, rewrite
from tests.conftest import ROOT

AWQ = """
class AWQSM70MoEMethod(FusedMoEMethodBase):
    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        layer.w13_tm_weight = prepare(layer.w13_qweight)
        layer.w2_tm_weight = prepare(layer.w2_qweight)
        del layer.w13_qweight, layer.w13_scales
        del layer.w2_qweight
        log("path enabled",
            2)  # odd formatting stays
"""
NVFP4 = '''
class ModelOptNvFp4FusedMoE(FusedMoEMethodBase):
    """As in stock vLLM: converted parameters take the place of the sources."""

    def process_weights_after_loading(self, layer):
        if self.done:
            return
        w13, w2 = prepare(layer.w13_weight), prepare(layer.w2_weight)
        replace_parameter(layer, "w13_weight", w13)
        replace_parameter(layer, "w2_weight", w2)
        self._setup_kernel(layer)
'''
FP8 = """
class Fp8SM70MoEMethod(FusedMoEMethodBase):
    def process_weights_after_loading(self, layer):
        w13 = layer.w13_weight
        w2 = layer.w2_weight.data
        layer.w13_tm_weight = prepare(w13)
        layer.w2_tm_weight = prepare(w2)
        del layer.w13_weight, layer.w2_weight
        log("fp8")
"""
THROUGH_A_METHOD = """
class GptOssMxfp4MoEMethod(FusedMoEMethodBase):
    def process_weights_after_loading(self, layer):
        w13 = layer.w13_weight
        if self.done:
            return
        self._setup_kernel(layer, w13)

    def _setup_kernel(self, layer, w13):
        replace_parameter(layer, "w13_weight", prepare(w13))
        replace_parameter(layer, "w2_weight", prepare(layer.w2_weight))
"""
NAMES = """
class ModelOptNvFp4FusedMoE(FusedMoEMethodBase):
    def process_weights_after_loading(self, layer):
        w13, w2 = layer.w13_weight, layer.w2_weight.data
        same = other = layer.w2_weight
        held: object = layer.w13_weight
        replace_parameter(layer, "w13_weight", prepare(w13))
        del w13
        w2 = prepare(w2)
        replace_parameter(layer, "w2_weight", w2)
        log(w2)
"""
EARLY = """
class CompressedTensorsWNA16MoEMethod(FusedMoEMethodBase):
    def process_weights_after_loading(self, layer):
        def shape(val):
            return val
        w13 = layer.w13_weight
        if self.done:
            return
        replace_parameter(layer, "w13_weight", prepare(w13))
        if self.in_place:
            w2 = layer.w2_weight
            replace_parameter(layer, "w2_weight", prepare(w2))
            # the kernel reads it as it is
            return
        elif self.unknown:
            raise ValueError
        for name, tensor in (("w2_weight", prepare(layer.w2_weight)),):
            replace_parameter(layer, name, tensor)
        if self.quiet: return
        log("slow")
"""
LOADERS = {"early": EARLY, "names": NAMES, "AWQ": AWQ, "NVFP4": NVFP4, "FP8": FP8, "MXFP4": THROUGH_A_METHOD}
SOURCES = {"AWQ": ("w13_qweight", "w2_qweight"), "other": ("w13_weight", "w2_weight")}


class Tensor:
    """Something that is gone when nobody holds it."""

    @property
    def data(self) -> "Tensor":
        return self


class World:
    """Runs a loader from its source, with a torch that notes releases and what was alive then."""

    def __init__(self, source: str, prepare: Callable[[Any], Any] = lambda tensor: Tensor()) -> None:
        self.alive_at_release: list[list[str]] = []
        self.sources: dict[str, weakref.ref[Tensor]] = {}
        self.layer = SimpleNamespace(w13_scales=Tensor())
        for name in SOURCES["AWQ" if "AWQ" in source else "other"]:
            tensor = Tensor()
            self.sources[name] = weakref.ref(tensor)
            setattr(self.layer, name, tensor)
        cuda = SimpleNamespace(is_available=lambda: True, empty_cache=self._release)
        module = ModuleType("loader")
        module.__dict__.update(
            FusedMoEMethodBase=object,
            RoutedExperts=object,
            torch=SimpleNamespace(cuda=cuda),
            prepare=prepare,
            log=lambda *words: None,
            replace_parameter=setattr,
        )
        exec(source.replace("import torch\n", ""), module.__dict__)
        (loader,) = [kind for kind in vars(module).values() if hasattr(kind, "process_weights_after_loading")]
        loader._setup_kernel = getattr(loader, "_setup_kernel", lambda self, layer: None)
        self.loader = loader()
        self.loader.done = self.loader.in_place = self.loader.unknown = self.loader.quiet = False

    def _release(self) -> None:
        gc.collect()
        self.alive_at_release.append([name for name, source in self.sources.items() if source() is not None])

    def load(self) -> None:
        self.loader.process_weights_after_loading(self.layer)


def patched(source: str) -> str:
    text, findings = rewrite("import torch\n" + source)
    assert [finding.state for finding in findings] == ["applicable"]
    return text


@pytest.mark.parametrize("name", LOADERS)
def test_loader_that_succeeds_releases_once_when_its_sources_are_gone(name: str) -> None:
    world = World(patched(LOADERS[name]))
    world.load()
    assert world.alive_at_release == [[]]


@pytest.mark.parametrize("name", LOADERS)
def test_loader_that_raises_releases_nothing_and_its_error_is_unchanged(name: str) -> None:
    error = RuntimeError("out of memory")

    def prepare(tensor: Any) -> Any:
        raise error

    world = World(patched(LOADERS[name]), prepare)
    with pytest.raises(RuntimeError) as caught:
        world.load()
    assert caught.value is error
    assert world.alive_at_release == []


@pytest.mark.parametrize("name", LOADERS)
def test_without_the_call_nothing_is_released(name: str) -> None:
    """The first test would fail without the patch: it is the call that makes it pass."""
    world = World(patched(LOADERS[name]).replace("torch.cuda.empty_cache()", "pass"))
    world.load()
    assert world.alive_at_release == []


@pytest.mark.parametrize("source", [NVFP4, EARLY])
def test_loader_that_has_nothing_to_do_releases_nothing(source: str) -> None:
    world = World(patched(source))
    world.loader.done = True
    world.load()
    assert world.alive_at_release == []


@pytest.mark.parametrize("way", ["in_place", "quiet"])
def test_every_way_through_a_loader_releases_once(way: str) -> None:
    world = World(patched(EARLY))
    setattr(world.loader, way, True)
    world.load()
    assert world.alive_at_release == [[]]


@pytest.mark.parametrize("name", LOADERS)
def test_every_other_byte_stays(name: str) -> None:
    before = "import torch\n" + LOADERS[name]
    after = patched(LOADERS[name]).splitlines()
    added = [line for line in after if line not in before.splitlines()]
    assert [line for line in after if line in before.splitlines()] == before.splitlines()
    release = [line.strip() for line in RELEASE.splitlines()]
    places = 2 if name == "early" else 1
    assert [line.strip() for line in added if not line.strip().startswith("del ")] == release * places


def test_patched_file_is_known_as_such() -> None:
    text = patched(AWQ)
    again, findings = rewrite(text)
    assert again == text
    assert [finding.state for finding in findings] == ["there"]


@pytest.mark.parametrize(
    ("body", "reason", "line"),
    [
        (
            """
        for name in NAMES:
            delattr(layer, name)
""",
            "inside a loop",
            4,
        ),
        (
            """
        del layer.w13_weight
        for name in NAMES:
            if name in self.done:
                return
        del layer.w2_weight
""",
            "returns inside a loop",
            5,
        ),
        (
            """
        del layer.w13_weight
        if self.fast: return
        del layer.w2_weight
""",
            "returns inside a loop, a try block or a line",
            5,
        ),
        (
            """
        if self.fast:
            del layer.w13_weight; return
        del layer.w2_weight
""",
            "returns in the statement that drops",
            5,
        ),
        (
            """
        if self.fast:
            w13 = layer.w13_weight
            del layer.w13_weight
            return prepare(w13)
        del layer.w2_weight
""",
            "local name w13 holds a source and is used after",
            5,
        ),
        (
            """
        w13 = layer.w13_weight
        self.again = lambda: prepare(w13)
        del layer.w13_weight
""",
            "local name w13 holds a source and is used after",
            4,
        ),
        (
            """
        if self.fast:
            del layer.w13_weight
            raise ValueError
""",
            "on no way on which it ends well",
            4,
        ),
        (
            """
        w13 = layer.w13_weight
        del layer.w13_weight
        self.keep = prepare(w13)
""",
            "local name w13 holds a source and is used after",
            4,
        ),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(body: str, reason: str, line: int) -> None:
    head = "import torch\nclass XMoEMethod(FusedMoEMethodBase):\n"
    head += "    def process_weights_after_loading(self, layer):"
    text, findings = rewrite(head + body)
    assert text == head + body
    (finding,) = findings
    assert finding.state == "refused"
    assert reason in finding.reason
    assert finding.line == line


def test_file_that_does_not_import_torch_is_refused() -> None:
    _, findings = rewrite(AWQ)
    assert findings[0].reason == "the file does not import torch"


def test_linear_methods_and_loaders_that_drop_nothing_are_left_alone() -> None:
    linear = AWQ.replace("AWQSM70MoEMethod(FusedMoEMethodBase)", "AWQLinearMethod(LinearMethodBase)")
    keeps = "class XMoEMethod(FusedMoEMethodBase):\n"
    keeps += "    def process_weights_after_loading(self, layer):\n        pass\n"
    for source in (linear, keeps):
        assert rewrite("import torch\n" + source) == ("import torch\n" + source, [])


# ── the command on a tree ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "vllm" / "model_executor" / "layers" / "quantization"
    folder.mkdir(parents=True)
    (folder / "awq_sm70_moe.py").write_text("import torch\n" + AWQ)
    (folder / "fp8_sm70_moe.py").write_text("import torch\n" + FP8)
    return tmp_path


def invoke(*arguments: object) -> Any:
    texts = [str(argument) for argument in arguments]
    return CliRunner().invoke(build(texts), texts)


def test_diff_is_taken_by_git_apply(tree: Path) -> None:
    printed = invoke("patch", "diff", tree).stdout
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    apply = ["git", "-C", str(tree), "apply", "-"]
    subprocess.run(apply, input=printed, text=True, check=True)
    assert invoke("patch", "check", tree).exit_code == 0
    text = (tree / "vllm/model_executor/layers/quantization/fp8_sm70_moe.py").read_text()
    assert text.count("torch.cuda.empty_cache()") == 1


def test_check_tells_the_state_of_each_loader(tree: Path) -> None:
    checked = invoke("patch", "check", tree / "vllm", "--json")
    assert checked.exit_code == 1
    assert {(entry["loader"], entry["state"]) for entry in json.loads(checked.stdout)} == {
        ("AWQSM70MoEMethod", "applicable"),
        ("Fp8SM70MoEMethod", "applicable"),
    }


def test_tree_without_such_loaders_is_an_error_and_not_a_success(tree: Path) -> None:
    for file in tree.rglob("*.py"):
        file.unlink()
    for verb in ("check", "diff", "apply"):
        assert "no MoE loader that drops its sources in" in str(invoke("patch", verb, tree).exception)


def test_apply_writes_all_files_and_a_second_time_nothing(tree: Path) -> None:
    assert "patched" in invoke("patch", "apply", tree).stdout
    assert "nothing to do" in invoke("patch", "apply", tree).stdout


def test_nothing_is_written_when_one_loader_is_not_understood(tree: Path) -> None:
    folder = tree / "vllm/model_executor/layers/quantization"
    odd = AWQ.replace("del layer.w2_qweight", "for n in N:\n            delattr(layer, n)")
    (folder / "odd_moe.py").write_text("import torch\n" + odd.replace("AWQSM70", "Odd"))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for verb in ("apply", "diff"):
        done = invoke("patch", verb, tree)
        assert done.exit_code != 0
        assert "odd_moe.py" in str(done.exception)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert "awq_sm70_moe.py" in invoke("patch", "diff", tree, "--skip-refused").stdout


def test_file_that_cannot_be_written_leaves_none_changed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tree / "vllm/model_executor/layers/quantization"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    write = Path.write_bytes

    def failing(path: Path, content: bytes) -> int:
        if "fp8_sm70_moe.py" in path.name:
            write(path, content[:100])
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", failing)
    assert "nothing was changed" in str(invoke("patch", "apply", tree).exception)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


ODD_FILES = {
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "a byte order mark": lambda text: "\ufeff" + text,
    "tabs": lambda text: text.replace("    ", "\t"),
    "form feeds and separators": lambda text: text.replace("import torch", "import torch\n\x0c\n# \u2028"),
    "no line feed at its end": lambda text: text.rstrip("\n"),
}


@pytest.mark.parametrize("oddity", ODD_FILES)
def test_odd_file_keeps_its_bytes_and_its_diff_is_taken(tree: Path, oddity: str) -> None:
    file = tree / "vllm/model_executor/layers/quantization/awq_sm70_moe.py"
    before = ODD_FILES[oddity]("import torch\n" + AWQ[: AWQ.index("        log(")]).encode()
    file.write_bytes(before)
    file.chmod(0o640)
    printed = invoke("patch", "diff", tree).stdout_bytes
    assert invoke("patch", "apply", tree).exit_code == 0
    after = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o640
    assert before.rstrip(b"\n") in after
    subprocess.run(["git", "-C", str(tree), "apply", "-R", "-"], input=printed, check=True)
    assert file.read_bytes() == before


@pytest.mark.parametrize("broken", ["not a folder", "a file that is no Python", "a file that is no UTF-8"])
def test_what_is_no_vllm_is_said_in_one_line(tree: Path, broken: str) -> None:
    if broken == "not a folder":
        assert "no vLLM in" in str(invoke("patch", "diff", "/nowhere").exception)
        return
    bad = tree / "vllm/model_executor/layers/bad.py"
    bad.write_bytes(b"# \xe9\n" if "UTF-8" in broken else b"def process_weights_after_loading(:\n")
    assert "bad.py: cannot be " in str(invoke("patch", "diff", tree).exception)


def test_list_names_the_known_loaders() -> None:
    assert "AWQSM70MoEMethod" in invoke("patch", "list").stdout


@pytest.mark.vllm
def test_patch_of_a_real_vllm_applies_and_compiles(need: Callable[[bool, str], None], tmp_path: Path) -> None:
    python = Path(os.environ.get("LOADPEAK_TEST_VLLM_PYTHON") or ROOT / ".venv-vllm/bin/python")
    need(python.exists(), f"there is no vLLM environment at {python} (make vllm-env builds one)")
    where = "import importlib.util; print(importlib.util.find_spec('vllm').submodule_search_locations[0])"
    package = Path(subprocess.check_output([python, "-c", where], text=True).strip())
    copy = tmp_path / "vllm" / "model_executor" / "layers"
    subprocess.run(["mkdir", "-p", str(copy.parent)], check=True)
    subprocess.run(["cp", "-r", str(package / "model_executor" / "layers"), str(copy)], check=True)
    states = [entry["state"] for entry in json.loads(invoke("patch", "check", tmp_path, "--json").stdout)]
    assert states.count("applicable") >= 25
    assert states.count("refused") <= 1
    assert invoke("patch", "apply", tmp_path, "--skip-refused").exit_code == 0
    compile_all = [sys.executable, "-m", "compileall", "-q", str(copy)]
    subprocess.run(compile_all, check=True)
