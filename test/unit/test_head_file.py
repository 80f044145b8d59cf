"""A head lies beside its drafter and serves no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_tree_head import random_head

from sglang_d3tree.config import OPTIONS
from sglang_d3tree.fingerprint import checkpoint_fingerprint, language_fingerprint
from sglang_d3tree.head_file import FLAG, HeadFile, head_path, load_head, save_head


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A drafter's and a target's directory, with a large and a small tensor each."""
    for name in ("drafter", "target"):
        (tmp_path / name).mkdir()
        tensors = {"large": torch.randn(300, 40), "visual.large": torch.randn(8), "norm": torch.randn(3)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    return tmp_path / "drafter", tmp_path / "target"


def change(directory: Path, name: str, place: int) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[place] += 1
    save_file({k: v.clone() for k, v in tensors.items()}, file)


@pytest.mark.parametrize("kind", ["linear", "path"])
def test_a_head_comes_back_as_it_was_saved(pair, kind):
    drafter, target = pair
    saved = HeadFile(random_head(1, kind, exclusive=True), 24, {"auc": 0.9})
    assert save_head(drafter, target, saved) == head_path(drafter, kind)
    loaded = load_head(drafter, target, kind)
    assert loaded is not None and (loaded.topk, loaded.report) == (24, {"auc": 0.9})
    assert loaded.weights.kind == kind and loaded.weights.exclusive
    for name in ("state", "token", "log_prob", "bias"):
        assert torch.equal(getattr(loaded.weights, name), getattr(saved.weights, name)), name
    if loaded.weights.path is not None:
        for name in ("parent", "query", "child"):
            assert torch.equal(getattr(loaded.weights.path, name), getattr(saved.weights.path, name)), name


def test_auto_takes_the_path_head_first_and_nothing_if_there_is_nothing(pair):
    drafter, target = pair
    assert load_head(drafter, target, "auto") is None
    for kind in ("linear", "path"):
        save_head(drafter, target, HeadFile(random_head(1, kind), 8, {}))
        loaded = load_head(drafter, target, "auto")
        assert loaded is not None and loaded.weights.kind == kind
    assert load_head(drafter, target, "none") is None
    with pytest.raises(ValueError, match=FLAG):
        head_path(drafter, "linear").unlink()
        load_head(drafter, target, "linear")


def test_a_head_of_another_drafter_or_target_is_refused_by_name(pair):
    drafter, target = pair
    for directory, role in ((drafter, "drafter"), (target, "target")):
        save_head(drafter, target, HeadFile(random_head(1, "path"), 8, {}))
        change(directory, "large", 0)
        with pytest.raises(ValueError, match=f"{FLAG} auto.*another {role}.*none"):
            load_head(drafter, target)
    save_head(drafter, target, HeadFile(random_head(1, "path"), 8, {}))
    change(target, "visual.large", 0)  # the language tower says what follows a text, and it is the same
    assert load_head(drafter, target) is not None


def test_a_damaged_head_is_refused_by_name(pair):
    drafter, target = pair
    path = save_head(drafter, target, HeadFile(random_head(1, "path"), 8, {}))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=FLAG):
        load_head(drafter, target)
    save_file({"state": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=FLAG):
        load_head(drafter, target)


def test_a_head_of_an_older_format_is_refused_by_name(pair, monkeypatch):
    drafter, target = pair
    with monkeypatch.context() as older:
        older.setattr("sglang_d3tree.head_file.FORMAT", "d3tree-head-1")
        save_head(drafter, target, HeadFile(random_head(1, "path"), 8, {}))
    with pytest.raises(ValueError, match=f"{FLAG} auto.*d3tree-head-1: train it again"):
        load_head(drafter, target)


def test_the_fingerprint_sees_both_ends_of_every_tensor(pair):
    drafter, _ = pair
    seen = {checkpoint_fingerprint(drafter)}
    for name, place in (("large", 0), ("large", -1), ("norm", 1)):
        change(drafter, name, place)
        seen.add(checkpoint_fingerprint(drafter))
    assert len(seen) == 4
    before = language_fingerprint(drafter)
    change(drafter, "visual.large", 2)
    assert language_fingerprint(drafter) == before != checkpoint_fingerprint(drafter)


def test_the_flag_of_the_messages_is_the_option_s():
    assert FLAG in {option.flag for option in OPTIONS}
