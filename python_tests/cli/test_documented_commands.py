"""The documentation's commands are understood: their recipes, keys and values exist. Its Python runs, links lead on."""

import dataclasses
import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml
from PIL import Image

from iecl_fast.cli import main
from iecl_fast.engine import pretrain as loop
from iecl_fast.engine import sweep as sweeps
from iecl_fast.engine.config import flatten, merge, read_recipe, resolve
from iecl_fast.engine.errors import RunError
from iecl_fast.engine.settings import RingConfig, SaibConfig
from iecl_fast.evaluate import from_checkpoint
from iecl_fast.ssl import METHODS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document, language):
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), flags=re.DOTALL)


LINES = sorted(
    {
        line
        for document in DOCUMENTS
        for block in blocks(document, "bash")
        for line in block.replace("\\\n", " ").splitlines()
    }
)
# A dry run looks for the data.
COMMANDS = [line for line in LINES if line.startswith("iecl-fast pretrain") and "--dry-run" not in line]
EVALUATIONS = [line for line in LINES if re.match("iecl-fast evaluate (knn|linear|finetune) ", line)]
SETTING = next(line for line in LINES if line.startswith("SETTING=")).partition("=")[2].strip('"')
SWEEPS = [
    line.replace("$SETTING", SETTING).replace("FOLDER", "photos")
    for line in LINES
    if line.startswith("iecl-fast sweep")
]
# Programs that need nothing but what they make themselves.
PROGRAMS = [*blocks(ROOT / "README.md", "python"), *blocks(ROOT / "docs" / "your_own.md", "python")]


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """What the commands name: images, a configuration, a run."""
    for part in ("train", "test"):
        folder = tmp_path / "photos" / part / "cat"
        folder.mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(folder / "1.png")
    (tmp_path / "mine.yaml").write_text(blocks(ROOT / "docs" / "your_own.md", "yaml")[0])
    (tmp_path / "temperature.yaml").write_text(blocks(ROOT / "docs" / "augmentations.md", "yaml")[0])
    monkeypatch.chdir(tmp_path)
    for run in ("photos", "NAME"):
        Path("runs", run).mkdir(parents=True)
        Path("runs", run, "config.yaml").write_text(yaml.safe_dump(resolve({"data": {"name": "photos"}}).to_dict()))


def test_there_are_commands():
    assert len(COMMANDS) > 20 and len(EVALUATIONS) > 10 and len(PROGRAMS) == 3


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(((?!https?:)[^)]+)\)", document.read_text()):
        path, _, heading = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE) if heading else []
        known = [re.sub(r"[^a-z0-9_ -]", "", text.lower()).replace(" ", "-") for text in headings]
        assert not heading or heading in known, target


@pytest.mark.parametrize("method", METHODS)
def test_every_key_is_explained_with_its_default(method):
    text = (ROOT / "docs" / "settings.md").read_text()
    config = resolve({"method": {"name": method}, "ring": None, "saib": None}).to_dict()
    parts = {"ring": dataclasses.asdict(RingConfig()), "saib": dataclasses.asdict(SaibConfig())}
    for key, value in flatten(config | parts).items():
        group, _, name = key.rpartition(".")
        word = re.search(rf"`(?:{group}\.)?{name}(?:=([^`]+))?`", text)
        assert word, key
        # Those of the method and of the data set are told in words.
        if word[1] and group not in ("method", "views"):
            told = yaml.safe_load(word[1])
            told = float(told) if isinstance(value, float) else told
            assert told == (list(value) if isinstance(value, tuple) else value), key


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(program, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "documentation", "exec"), {})


@pytest.mark.parametrize("command", EVALUATIONS)
def test_an_evaluation_would_begin(command, monkeypatch, user_folder, capsys):
    def begin(protocol, checkpoint, *, data, overrides):
        for name in data or ["digits"]:
            seen.append(resolve(merge({"data": {"name": name}}, overrides)).data.name)
        raise RunError("seen enough")

    seen = []
    monkeypatch.setattr(from_checkpoint, "evaluate_checkpoint", begin)
    words = shlex.split(command, comments=True)
    assert main(words[1:]) == 1, capsys.readouterr().err
    named = [after for word, after in itertools.pairwise(words) if word == "--data"]
    assert seen == (named or ["digits"])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_would_begin(command, monkeypatch, user_folder, capsys):
    def begin(config, resume=None):
        seen.append(config)
        raise RunError("seen enough")

    seen = []
    monkeypatch.setattr(loop, "pretrain", begin)
    words = shlex.split(command, comments=True)
    assert main(words[1:]) == 1, capsys.readouterr().err
    (config,) = seen
    if config.ring is not None:
        assert config.method["name"] in ("ir", "cmc", "moco", "iecl")
    if "ring=null" in words or config.method["name"] == "la":
        assert config.ring is None
    elif any("_ring" in word or word.startswith("ring.") for word in words):
        assert config.ring is not None
    if "--data" in words:
        assert Path(config.data.name).name == words[words.index("--data") + 1]


@pytest.mark.parametrize("command", SWEEPS)
def test_a_sweep_would_begin(command, monkeypatch, user_folder, capsys):
    def begin(configs, *, seeds, output, layers, axis):
        for name in configs if axis is None else configs.values():
            mapping = read_recipe(name)
            for layer in layers:
                mapping = merge(mapping, layer)
            seen.append(resolve(mapping))
        raise RunError("seen enough")

    seen = []
    monkeypatch.setattr(sweeps, "sweep", begin)
    assert main(shlex.split(command, comments=True)[1:]) == 1, capsys.readouterr().err
    assert seen
