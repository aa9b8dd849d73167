"""Whether an engine can be started here is known before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import SettingsError
from pipeline.products.params import get_product, load_params
from pipeline.products.text import engine_commands
from pipeline.products.text.engine_commands import check_commands
from pipeline.products.text.settings import CandidateSettings, TextProduct
from tests.paths import ROOT

NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"


def make_product(*command: str, **engine: Any) -> TextProduct:
    """Return a product of which a vLLM started so serves one candidate."""
    product = get_product(load_params(ROOT / "params.yaml"), "agent", kind=TextProduct)
    made = CandidateSettings.model_validate(
        {
            "checkpoint": "models/agent",
            "steps": [],
            "engine": {"kind": "vllm", "command": list(command), "version": "0.32.0", **engine},
        }
    )
    return product.model_copy(update={"candidates": product.candidates | {"made": made}})


def write_docker(folder: Path, script: str) -> str:
    """Write a docker that runs a script; return its path."""
    path = folder / "docker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("command", ["no-such-vllm", "no/such/vllm"])
def test_a_vllm_that_is_not_here_is_refused_before_the_others_are_made(command: str) -> None:
    """It was a warning, which nobody read before all other candidates were made; a cluster's nodes may have it."""
    product = make_product(command, "serve")
    (line,) = check_commands(product, ROOT, is_local=False)
    assert line.startswith(f"candidates.made.engine.command: expected a program, found no {command!r} here")
    with pytest.raises(SettingsError) as caught:
        check_commands(product, ROOT, is_local=True)
    assert str(caught.value) == line


def test_whoever_has_the_evaluation_may_judge_it_without_the_engine(tmp_path: Path) -> None:
    """A CI job that pulls results and judges them has no vLLM."""
    product = make_product("no-such-vllm", "serve")
    (tmp_path / product.build / "evaluations/made").mkdir(parents=True)
    assert check_commands(product, tmp_path, is_local=True) == check_commands(product, tmp_path, is_local=False) != []


def test_docker_without_its_daemon_is_refused_with_the_cause(tmp_path: Path) -> None:
    """The program was there, and so the reference was evaluated before anybody asked it."""
    docker = write_docker(tmp_path, f"echo >&2 '{NO_DAEMON}'; exit 1")
    with pytest.raises(SettingsError) as caught:
        check_commands(make_product(docker, "run", "image"), ROOT, is_local=True)
    assert str(caught.value) == (
        f"candidates.made.engine.command: expected an answer to `{docker} version`, got: {NO_DAEMON}; start what runs "
        "its containers, or name another command"
    )


def test_docker_is_asked_as_it_will_be_started_and_once(tmp_path: Path) -> None:
    """Another context or host has a daemon of its own."""
    docker = write_docker(tmp_path, f'echo "$@ $DOCKER_HOST" >> {tmp_path}/asked')
    product = make_product(
        docker, "--context", "far", "run", "-e", "DOCKER_HOST", "i", environment={"DOCKER_HOST": "h"}
    )
    product = product.model_copy(update={"candidates": product.candidates | {"b": product.candidates["made"]}})
    assert check_commands(product, ROOT, is_local=True) == []
    assert (tmp_path / "asked").read_text() == "--context far version h\n"


@pytest.mark.parametrize(
    ("words", "asked"),
    [(("container", "run", "i"), "version"), (("--context", "far", "exec", "c", "vllm"), "--context far version")],
)
def test_docker_is_asked_whatever_starts_the_container(tmp_path: Path, words: tuple[str, ...], asked: str) -> None:
    """`docker container version` is no command: what worked was refused."""
    docker = write_docker(tmp_path, f'echo "$@" >> {tmp_path}/asked')
    assert check_commands(make_product(docker, *words), ROOT, is_local=True) == []
    assert (tmp_path / "asked").read_text().strip() == asked


def test_a_vllm_on_the_path_of_its_own_environment_is_found(tmp_path: Path) -> None:
    write_docker(tmp_path, "true")
    (tmp_path / "docker").rename(tmp_path / "own-vllm")
    product = make_product("own-vllm", "serve", environment={"PATH": f"{tmp_path}:/usr/bin"})
    assert check_commands(product, ROOT, is_local=True) == []


def test_a_daemon_that_hangs_does_not_hold_up_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_commands, "ASK_TIMEOUT_S", 0.2)
    docker = write_docker(tmp_path, "exec sleep 60")
    with pytest.raises(SettingsError, match=r"version`, got: none within 0\.2 s; start what runs"):
        check_commands(make_product(docker, "run", "image"), ROOT, is_local=True)
