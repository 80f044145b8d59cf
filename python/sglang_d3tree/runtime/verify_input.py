"""What a D3TREE forward pass carries besides tokens and slots."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_d3tree.tree.layout import VerifyRows


@dataclass
class TreeVerifyInput(DFlashVerifyInput):
    """Spec input of a pass in TARGET_VERIFY mode.

    ``verify_rows`` holds the ragged rows and their ancestor mask for the target's pass; it is None for the draft
    block, where every request has ``draft_token_num`` rows that see each other both ways.
    """

    verify_rows: VerifyRows | None = None
