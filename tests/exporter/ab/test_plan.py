"""Arms, prompts and the order of startups, as the options say them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from loadpeak.errors import CommandError, SettingError
from loadpeak_exporter.ab import plan
from loadpeak_exporter.ab.completions import address_of, says_server
from loadpeak_exporter.ab.records import FORMAT, Arm, Experiment, Prompt

CONF = "expandable_segments:True,max_split_size_mb:20"


def test_arms_take_settings_one_by_one_or_together(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    arms = plan.parse_arms(
        [
            "both:release=threshold:2GiB split-limit=keep",
            f"conf:alloc-conf={CONF}",
            "conf:flag=--enforce-eager",
            """conf:flag='--override {"a": 1}'""",
            f"other:environment={tmp_path}",
        ]
    )
    assert arms == (
        Arm(name="baseline"),
        Arm(name="both", release="threshold:2GiB", split_limit="keep"),
        Arm(name="conf", alloc_conf=CONF, arguments=("--enforce-eager", "--override", "{a:", "1}")),
        Arm(name="other", environment=str(tmp_path)),
    )


def test_baseline_comes_first_wherever_it_is_given() -> None:
    arms = plan.parse_arms(["a:release=layer", "baseline:flag=--enforce-eager", "b:release=off"])
    assert [arm.name for arm in arms] == ["baseline", "a", "b"]
    assert arms[0].arguments == ("--enforce-eager",)


@pytest.mark.parametrize(
    "option",
    [
        "fix",
        "fix:",
        ":release=layer",
        "fix:release",
        "fix:colour=red",
        "a b:release=layer",
        "../x:release=layer",
        "fix:flag='--open",
        "fix:environment=/nowhere",
        "baseline:release=off",
    ],
)
def test_arm_that_cannot_be_read_is_refused(option: str) -> None:
    with pytest.raises(CommandError):
        plan.parse_arms([option])


@pytest.mark.parametrize("option", ["fix:release=banana", "fix:split-limit=kepe"])
def test_setting_that_cannot_be_used_is_refused_before_anything_starts(option: str) -> None:
    with pytest.raises(SettingError):
        plan.parse_arms([option])


def experiment(pairs: int = 3, **fields: object) -> Experiment:
    values: dict[str, object] = {
        "format": FORMAT,
        "experiment": "e",
        "created_at_wall_seconds": 1.0,
        "hostname": "h",
        "command": ("vllm", "serve", "m"),
        "arms": (Arm(name="baseline"), Arm(name="a"), Arm(name="b")),
        "pairs": pairs,
    }
    return Experiment(**{**values, **fields})  # type: ignore[arg-type]


def test_every_other_round_runs_backwards() -> None:
    names = [f"{pair}{arm.name[:1]}" for pair, arm in plan.order(experiment())]
    assert names == ["0b", "0a", "0b", "1b", "1a", "1b", "2b", "2a", "2b"]
    assert [arm.name for pair, arm in plan.order(experiment()) if pair == 1] == ["b", "a", "baseline"]


def test_environment_of_an_arm_overrides_ours() -> None:
    ours = {
        "PATH": "/bin",
        "PYTORCH_ALLOC_CONF": "old",
        "PYTORCH_CUDA_ALLOC_CONF": "older",
        "LOADPEAK_CACHE_RELEASE": "layer",
        "LOADPEAK_VARIANT": "mine",
    }
    environ = plan.arm_environment(Arm(name="x", alloc_conf=CONF, environment="/env"), ours)
    assert environ["PYTORCH_CUDA_ALLOC_CONF"] == CONF
    assert "PYTORCH_ALLOC_CONF" not in environ
    assert environ["PATH"] == f"/env/bin{os.pathsep}/bin"
    assert (environ["LOADPEAK_CACHE_RELEASE"], environ["LOADPEAK_VARIANT"]) == ("off", "x")
    assert environ["LOADPEAK_EVIDENCE"] == "on"
    assert plan.arm_environment(Arm(name="x"), ours)["PYTORCH_ALLOC_CONF"] == "old"
    bare = plan.arm_environment(Arm(name="x", alloc_conf=""), ours)
    assert not [name for name in bare if name.startswith("PYTORCH")]


def test_name_of_a_run_in_our_environment_is_given_to_no_startup() -> None:
    environ = plan.arm_environment(Arm(name="x"), {"LOADPEAK_RUN_ID": "mine"})
    assert environ["LOADPEAK_RUN_ID"] != "mine"


def test_program_of_another_environment_is_taken_by_its_name(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    arm = Arm(name="x", environment=str(tmp_path), arguments=("--flag",))
    with pytest.raises(CommandError, match="is vLLM installed"):
        plan.arm_command(arm, ("/old/bin/vllm", "serve"))
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert plan.arm_command(arm, ("/old/bin/vllm", "serve")) == [str(program), "serve", "--flag"]


def test_prompts_are_texts_or_token_ids(tmp_path: Path) -> None:
    texts, tokens = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    texts.write_text("one\n\n[1, 2]\n")
    tokens.write_text('"one"\n[1, 2]\n')
    assert plan.read_prompts(texts) == (Prompt(text="one"), Prompt(text="[1, 2]"))
    assert plan.read_prompts(tokens) == (Prompt(text="one"), Prompt(token_ids=(1, 2)))


def test_only_line_feeds_end_a_prompt(tmp_path: Path) -> None:
    """Editors put a byte order mark first; other separators of Unicode may stand in a text."""
    texts, strings = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    texts.write_bytes("\ufeffone\x0ctwo\r\nthree\n".encode())
    strings.write_bytes('\ufeff"a\u2028b"\r\n'.encode())
    assert plan.read_prompts(texts) == (Prompt(text="one\x0ctwo"), Prompt(text="three"))
    assert plan.read_prompts(strings) == (Prompt(text="a\u2028b"),)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "holds no prompt"),
        ("p.txt", b"\xff\xfe", "cannot be read"),
        ("p.jsonl", b'"a"\n""\n', "line 2 is an empty prompt"),
        ("p.jsonl", b"[]\n", "line 1 is an empty prompt"),
        ("p.jsonl", b"{}\n", "line 1 is no prompt"),
        ("p.jsonl", b"[-1]\n", "line 1 is no prompt"),
        ("p.JSONL", b"[4294967296]\n", "line 1 is no prompt"),
        ("missing", None, "cannot be read"),
    ],
)
def test_prompts_that_cannot_be_sent_are_refused(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CommandError, match=message):
        plan.read_prompts(tmp_path / name)


def test_engine_without_a_tokenizer_gets_token_ids() -> None:
    prompts = plan.default_prompts(["vllm", "serve", "m", "--skip-tokenizer-init"])
    assert all(prompt.token_ids for prompt in prompts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hostname", "other"),
        ("command", ("vllm",)),
        ("arms", (Arm(name="baseline"),)),
        ("pairs", 1),
        ("prompts", (Prompt(text="p"),)),
        ("max_tokens", 1),
    ],
)
def test_other_plan_is_told_apart(field: str, value: object) -> None:
    assert plan.same_plan(experiment(), experiment(created_at_wall_seconds=2.0)) is None
    other = msgspec.structs.replace(experiment(), **{field: value})
    assert f"its {field} " in str(plan.same_plan(experiment(), other))


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--port", "81"], "http://127.0.0.1:81"),
        (["--port=81", "--host=0.0.0.0"], "http://127.0.0.1:81"),
        (["--host", "::"], "http://[::1]:8000"),
        (["--port", "81", "--port", "82"], "http://127.0.0.1:82"),
        (["--port"], "http://127.0.0.1:8000"),
    ],
)
def test_address_is_the_commands_own(arguments: list[str], url: str) -> None:
    assert address_of(["vllm", "serve", "m", *arguments], {}).url == url


def test_key_of_a_server_is_sent_to_it() -> None:
    assert address_of(["vllm", "--api-key", "k"], {"VLLM_API_KEY": "other"}).key == "k"
    assert address_of(["vllm"], {"VLLM_API_KEY": "other"}).key == "other"


@pytest.mark.parametrize(
    ("command", "server"),
    [
        (["vllm", "serve", "m"], True),
        (["python", "-m", "vllm.entrypoints.openai.api_server"], True),
        (["./start.sh", "--port", "1"], True),
        (["python", "script.py"], False),
    ],
)
def test_server_is_told_from_a_script_by_its_command(command: list[str], server: bool) -> None:
    assert says_server(command) == server
