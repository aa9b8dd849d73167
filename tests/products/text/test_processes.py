"""What a dead server's log says, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.products.text.serving.engines.processes import read_cause

AT = "(APIServer pid=7) ERROR 11-21 19:57:15 [validation.py:151] "
REFUSED = (
    f"{AT}RequestValidationError caught. Request id: None\n"
    f"{AT}fastapi.exceptions.RequestValidationError: 2 validation errors:\n"
)
DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)."
AFTER = 'INFO:     127.0.0.1:43676 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'


@pytest.mark.parametrize(
    ("log", "said"),
    [
        pytest.param(
            f"{REFUSED}(APIServer pid=7) ERROR 11-21 19:57:22 [vllm_error.py:54] {DEAD}\n{AFTER}",
            DEAD,
            id="an-engine-that-was-killed-leaves-no-root-cause",
        ),
        pytest.param(
            "(EngineCore pid=7) ERROR 11-21 15:12:22 [core.py:88] ValueError: no kernel for int4\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: no kernel for int4",
            id="root-cause-above-its-pointer",
        ),
        pytest.param(
            f'{REFUSED}Traceback (most recent call last):\n  File "x.py", line 1\nbye\n', "bye", id="nothing-named"
        ),
        pytest.param(
            'ValueError: of a request\n{"failure": "a: answering chats:\\n the GPU failed"}\nKeyError: of a thread\n',
            "a: answering chats: the GPU failed",
            id="our-launchers-own-word",
        ),
        pytest.param(
            "terminate called after throwing an instance of 'c10::AcceleratorError'\n"
            "  what():  CUDA error: unspecified launch failure\n",
            "what():  CUDA error: unspecified launch failure",
            id="torch-ends-the-process-itself",
        ),
        pytest.param(
            "docker: Cannot connect to the daemon. Is it running?\n\nRun 'docker run --help' for more information\n",
            "docker: Cannot connect to the daemon. Is it running?",
            id="a-hint-behind-the-cause",
        ),
        pytest.param("", "its log says nothing", id="empty"),
        pytest.param(
            "W1128 18:53:51.856000 22393 torch/_pytree.py:630] an enum is deprecated\n",
            "its log says nothing",
            id="torch",
        ),
    ],
)
def test_the_line_that_says_most(tmp_path: Path, log: str, said: str) -> None:
    path = tmp_path / "server.log"
    path.write_text(log)
    assert read_cause(path) == said
