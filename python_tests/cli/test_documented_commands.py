"""Commands in the documentation are understood: their recipes, keys and values exist."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from iecl_fast.cli import main
from iecl_fast.engine import pretrain as loop
from iecl_fast.engine.config import merge, resolve
from iecl_fast.engine.errors import RunError
from iecl_fast.evaluate import from_checkpoint

DOCUMENTS = Path(__file__).parents[2] / "docs"
LINES = sorted(
    {
        line
        for document in DOCUMENTS.glob("*.md")
        for block in re.findall(r"```bash\n(.*?)```", document.read_text(), flags=re.DOTALL)
        for line in block.splitlines()
    }
)
# A dry run looks for the data.
COMMANDS = [line for line in LINES if line.startswith("iecl-fast pretrain") and "--dry-run" not in line]
EVALUATIONS = [line for line in LINES if re.match("iecl-fast evaluate (knn|linear|finetune) ", line)]


def test_there_are_commands():
    assert len(COMMANDS) > 20 and len(EVALUATIONS) > 10


@pytest.mark.parametrize("command", EVALUATIONS)
def test_an_evaluation_would_begin(command, monkeypatch, tmp_path, capsys):
    def begin(protocol, checkpoint, *, data, overrides):
        for name in data or ["digits"]:
            seen.append(resolve(merge({"data": {"name": name}}, overrides)).data.name)
        raise RunError("seen enough")

    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(from_checkpoint, "evaluate_checkpoint", begin)
    words = shlex.split(command, comments=True)
    assert main(words[1:]) == 1, capsys.readouterr().err
    named = [after for word, after in itertools.pairwise(words) if word == "--data"]
    assert seen == (named or ["digits"])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_would_begin(command, monkeypatch, tmp_path, capsys):
    def begin(config, resume=None):
        seen.append(config)
        raise RunError("seen enough")

    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "pretrain", begin)
    words = shlex.split(command, comments=True)
    assert main(words[1:]) == 1, capsys.readouterr().err
    (config,) = seen
    if config.ring is not None:
        assert config.method["name"] in ("ir", "cmc", "moco")
    if "ring=null" in words or config.method["name"] == "la":
        assert config.ring is None
    elif any("_ring" in word or word.startswith("ring.") for word in words):
        assert config.ring is not None
    if "--data" in words:
        assert config.data.name == words[words.index("--data") + 1]
