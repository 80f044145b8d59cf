"""The tiny recipe of a head end to end: answers, drafter, collected trees, fit, report, file; and joint mode."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_d3tree.cli import main
from sglang_d3tree.demo.target import build_tiny_target
from sglang_d3tree.head_file import load_head
from sglang_d3tree.train import data, drafter
from sglang_d3tree.train.head import train_head
from sglang_d3tree.train.head_collect import CollectOptions, collect_all
from sglang_d3tree.train.head_fit import FitOptions, split_by_conversation
from sglang_d3tree.train.shards import DataOptions

OPTIONS = DataOptions(seed=3, per_shard=12, max_new=20, long_max_new=28, sampled_share=0.4)
COLLECT = CollectOptions(seed=1, conversations=30, drafts=10, trees=4, nodes=9, topk=6, dtype="float32")
FIT = FitOptions(seed=1, epochs=12, batch=16, lr=1e-2)
TRAIN = drafter.TrainOptions(
    layers=1, block_size=4, steps=40, rows=256, conversations=4, warmup_steps=5, lr=3e-3, warm=False,
    head_frequent=16, head_sample=8, soft=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Target, shards of its answers, and a drafter trained on them for a moment."""
    root = tmp_path_factory.mktemp("head")
    target = build_tiny_target(root / "target", vocab_size=64, seed=1)
    data.generate(target, root / "data", num_shards=3, options=OPTIONS, slots=8, progress=False)
    trainer = drafter.Trainer(target, [root / "data"], TRAIN)
    for _ in range(TRAIN.steps):
        trainer.train_step()
    drafter.save_dflash_checkpoint(trainer.model, root / "drafter")
    return target, root / "data", root / "drafter"


def test_collecting_goes_on_where_it_stopped(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, answers, drafter_dir = pair
    whole = collect_all(target, drafter_dir, [answers], COLLECT, tmp_path, progress=False)
    assert len(whole.conversation.unique()) == 30
    assert int(whole.tree_valid[:, 0].sum()) == sum(
        min(4, int((whole.conversation == c).sum())) for c in range(30)
    )
    files = sorted(tmp_path.glob("*/drafts-*.safetensors"))
    assert len(files) == 2
    before = files[1].read_bytes()
    files[1].unlink()
    files[1].with_suffix(".partial").write_bytes(b"half")
    again = collect_all(target, drafter_dir, [answers], COLLECT, tmp_path, progress=False)
    assert files[1].read_bytes() == before
    assert torch.equal(again.states, whole.states)
    # Other options are other data, in another folder.
    other = collect_all(target, drafter_dir, [answers], replace(COLLECT, seed=2), tmp_path, progress=False)
    assert len(list(tmp_path.glob("*/collected.json"))) == 2
    assert not torch.equal(other.tree_tokens[:10], whole.tree_tokens[:10])


def test_recorded_answers_and_verified_trees_agree(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """After the anchor both say the same: the tree from its own pass, the path from the recorded states."""
    target, answers, drafter_dir = pair
    found = collect_all(target, drafter_dir, [answers], COLLECT, tmp_path, progress=False)
    verified = found[found.tree_valid[:, 0].nonzero().squeeze(1)]
    agree = verified.tree_targets[:, 0] == verified.path_targets[:, 0]
    assert float(agree.float().mean()) > 0.95  # recorded states are rounded to bfloat16
    assert torch.equal(verified.tree_tokens[:, 0], verified.path_tokens[:, 0])


@pytest.mark.parametrize("kind", ["linear", "path"])
def test_a_head_learns_more_than_the_draft_knows(pair: tuple[Path, Path, Path], tmp_path: Path, kind: str) -> None:
    target, answers, drafter_dir = pair
    out = tmp_path / "drafter"
    shutil.copytree(drafter_dir, out)
    fitting = replace(FIT, rank=4 if kind == "path" else 0, exclusive=kind == "path")
    head, found = train_head(target, out, [answers], out, tmp_path / "cache", COLLECT, fitting, progress=False)
    assert found["parameters"] == (2 * 64 + 2 if kind == "linear" else 2 * 64 + 2 + 3 * 4 * 64)
    assert min(found["validation_loss"]) < 0.97 * found["validation_loss"][0]
    scores = found["validation"]["all_candidates"]
    assert scores["auc"] > scores["auc_of_draft"] - 0.02
    assert scores["ece"] < scores["ece_of_draft"]
    file = load_head(out, target, kind)
    assert file is not None and file.topk == 6
    assert torch.equal(file.weights.state, head.state)
    on_disk = json.loads((out / "tree_head" / f"{kind}.json").read_text())
    assert on_disk["validation"]["tree_nodes"]["nodes"] == found["validation"]["tree_nodes"]["nodes"]
    assert (out / "tree_head" / f"{kind}.png").stat().st_size > 10_000
    # The same seed gives the same head, from collected data or not.
    second, _ = train_head(target, out, [answers], out, tmp_path / "cache", COLLECT, fitting, progress=False)
    assert torch.equal(second.token, head.token)


def test_validation_holds_whole_conversations(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, answers, drafter_dir = pair
    found = collect_all(target, drafter_dir, [answers], COLLECT, tmp_path, progress=False)
    training, validation = split_by_conversation(found, seed=0)
    assert len(training) + len(validation) == len(found)
    assert not set(training.conversation.tolist()) & set(validation.conversation.tolist())


def test_joint_command_writes_a_drafter_with_its_head_and_compares(
    pair: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    target, answers, drafter_dir = pair
    start, out = tmp_path / "start", tmp_path / "joint"
    shutil.copytree(drafter_dir, start)
    train_head(target, start, [answers], start, tmp_path / "cache", COLLECT, replace(FIT, epochs=2), progress=False)
    common = ["train", "head", "--target", str(target), "--drafter", str(start), "--data", str(answers)]
    joint = ["--joint", "--kind", "linear", "--steps", "3", "--run-dir", str(tmp_path / "run"), "--dtype", "float32"]
    assert main([*common, *joint]) == 1  # nowhere to write it
    assert main([*common, *joint, "--out", str(out)]) == 0
    file = load_head(out, target, "linear")
    assert file is not None and file.topk == 6
    before = load_head(start, target, "linear")
    assert before is not None and not torch.equal(file.weights.state, before.weights.state)
    report = json.loads((out / "tree_head" / "linear.json").read_text())
    assert report["steps"] == 3
    for rows in ("8", "16"):
        assert 1.0 <= report["frozen"][rows] <= 4.0 and 1.0 <= report["joint"][rows] <= 4.0


def test_answers_of_another_target_are_refused(
    pair: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, answers, drafter_dir = pair
    other = build_tiny_target(tmp_path / "other", vocab_size=64, seed=2)
    command = ["train", "head", "--target", str(other), "--drafter", str(drafter_dir), "--data", str(answers)]
    assert main([*command, "--cache", str(tmp_path / "cache")]) == 1
    assert "answered by another target" in capsys.readouterr().err
