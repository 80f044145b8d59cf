"""The ``d3tree`` command. Each subcommand imports what it needs, so that ``--help`` is immediate."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; errors that a user can fix end with one line on stderr and exit code 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(given[0] if given else "")
    args, server_flags = parser.parse_known_args(given)
    if server_flags and not getattr(args, "takes_server_flags", False):
        parser.error(f"unrecognized arguments: {' '.join(server_flags)}")
    args.server_flags = server_flags
    try:
        return int(args.run(args) or 0)
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        print(f"d3tree: {error}", file=sys.stderr)
        return 1


def _parser(command: str) -> argparse.ArgumentParser:
    # The training modules import torch to declare their arguments: only when their command is the one asked for.
    parser = argparse.ArgumentParser(prog="d3tree", description="D3TREE speculative decoding for SGLang.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_data(commands, command == "data")
    _add_train(commands, command == "train")
    _add_init_drafter(commands)
    _add_token_map(commands, command == "build-token-map")
    _add_calibrate(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="build and serve the demo pair, ask it about an image and a text")
    mode = demo.add_mutually_exclusive_group()
    mode.add_argument("--prepare-only", action="store_true", help="only build the checkpoints")
    mode.add_argument("--serve", action="store_true", help="keep the server up and print a curl command")
    mode.add_argument("--chat", action="store_true", help="chat in the terminal, with images")
    demo.add_argument("--json", action="store_true", help="print the checkpoint paths as a last line of JSON")
    demo.set_defaults(run=_run_demo)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _run_demo(args: argparse.Namespace) -> int:
    from sglang_d3tree.demo.pair import prepare_pair

    # The server is a process group of its own: ended by a signal without this, the demo would leave it running.
    signal.signal(signal.SIGTERM, _end)
    pair = prepare_pair()
    if args.serve:
        from sglang_d3tree.demo.chat import serve

        serve(pair)
    elif args.chat:
        from sglang_d3tree.demo.chat import chat

        chat(pair)
    elif not args.prepare_only:
        from sglang_d3tree.demo.tour import tour

        tour(pair)
    if args.json:
        paths = {"model_path": str(pair.model_path), "draft_model_path": str(pair.draft_model_path)}
        print(json.dumps(paths))
    return 0


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser], chosen: bool) -> None:
    data = commands.add_parser("data", help="training data made by the target itself")
    if not chosen:
        return
    actions = data.add_subparsers(required=True, metavar="ACTION")
    generate = actions.add_parser("generate", help="let the target answer prompts and keep its own tokens")
    from sglang_d3tree.train import data as module

    module.add_arguments(generate)
    generate.set_defaults(run=module.run)


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser], chosen: bool) -> None:
    train = commands.add_parser("train", help="train a drafter, its tree-size head, or the demo's vision tower")
    if not chosen:
        return
    from sglang_d3tree.train import drafter, head, vision

    parts = train.add_subparsers(required=True, metavar="PART")
    for name, module, text in (
        ("drafter", drafter, "a DFlash drafter, on data of `d3tree data generate`"),
        ("head", head, "the tree-size head of a drafter: which candidates the target will accept"),
        ("vision", vision, "the demo verifier's vision tower"),
    ):
        part = parts.add_parser(name, help=text)
        module.add_arguments(part)
        part.set_defaults(run=module.run)


def _add_init_drafter(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    init = commands.add_parser("init-drafter", help="write an untrained drafter that fits a target")
    init.add_argument("--target", required=True, help="checkpoint directory of the target")
    init.add_argument("--out", required=True, help="where the drafter goes")
    init.add_argument("--layers", type=int, default=2, help="draft layers")
    init.add_argument("--block-size", type=int, default=8, help="drafted block, anchor included")
    init.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    init.set_defaults(run=_run_init_drafter)


def _run_init_drafter(args: argparse.Namespace) -> int:
    from sglang_d3tree.train.drafter import init_drafter

    print(init_drafter(args.target, args.out, layers=args.layers, block_size=args.block_size, seed=args.seed))
    return 0


def _add_token_map(commands: argparse._SubParsersAction[argparse.ArgumentParser], chosen: bool) -> None:
    build = commands.add_parser("build-token-map", help="reduce the draft's vocabulary to the target's usual tokens")
    if not chosen:
        return
    from sglang_d3tree.train import token_map

    token_map.add_arguments(build)
    build.set_defaults(run=token_map.run)


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure what drafting and verifying cost on this machine",
        description="Starts a server with the given flags, measures, and stops it. Flags that this command does not "
        "know are the server's: give those that will be served with.",
    )
    calibrate.add_argument("--out", default="d3tree-costs.json", help="the profile; a plot goes beside it as .png")
    calibrate.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    calibrate.set_defaults(run=_run_calibrate, takes_server_flags=True)


def _run_calibrate(args: argparse.Namespace) -> int:
    from pathlib import Path

    from sglang_d3tree.calibrate import calibrate

    calibrate(args.server_flags, Path(args.out), args.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
