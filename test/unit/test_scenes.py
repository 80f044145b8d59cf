"""Scenes: reproducible, split by content, and described in words that can be marked."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest

from sglang_d3tree.demo import scenes

THING = scenes.Thing(region=0, shape="circle", color="red", size="large")
OTHER = scenes.Thing(region=4, shape="star", color="blue", size="small")
PAIR = scenes.Scene((THING, OTHER), text="cat", text_region=7)


def take(count: int, seed: int = 0, held_out: bool = False) -> list[scenes.Scene]:
    return list(islice(scenes.scenes(seed, held_out=held_out), count))


def test_same_seed_same_scenes_and_pixels() -> None:
    first, second = take(20), take(20)
    assert first == second
    for scene in first:
        one, two = scenes.render(scene, 3), scenes.render(scene, 3)
        assert one.image.tobytes() == two.image.tobytes()
        assert one.image.size == (scenes.SIDE, scenes.SIDE)
        assert one.image.tobytes() != scenes.render(scene, 4).image.tobytes()
    assert take(20, seed=1) != first


def test_held_out_scenes_never_occur_in_training() -> None:
    training = {scene.key() for seed in range(4) for scene in take(300, seed)}
    held_out = {scene.key() for seed in range(4) for scene in take(100, seed, held_out=True)}
    assert len(held_out) > 350
    assert not training & held_out
    everything = [scenes.sample_scene(random.Random(i)) for i in range(2000)]
    assert 0.07 < sum(map(scenes.is_held_out, everything)) / len(everything) < 0.13


@pytest.mark.parametrize("scene", take(50, seed=7))
def test_drawings_lie_inside_their_regions(scene: scenes.Scene) -> None:
    picture = scenes.render(scene, 0)
    third = scenes.SIDE / 3
    assert list(scene.things) == sorted(scene.things)
    for thing, (x, y) in zip(scene.things, picture.centers, strict=True):
        assert (y // third) * 3 + x // third == thing.region
    if scene.text is not None:
        assert picture.text_box is not None
        assert min(picture.text_box) >= 0 and max(picture.text_box) <= scenes.SIDE
        assert scene.text_region not in {thing.region for thing in scene.things}


def test_words_for_a_scene() -> None:
    assert scenes.describe(PAIR) == (
        "There are two shapes. The first is a large red circle at the top left. "
        "The second is a small blue star at the center. The word cat is printed at the bottom."
    )
    assert scenes.list_shapes(PAIR) == "1. large red circle\n2. small blue star"
    assert json.loads(scenes.as_json(PAIR)) == {
        "count": 2,
        "shapes": [
            {"size": "large", "color": "red", "shape": "circle"},
            {"size": "small", "color": "blue", "shape": "star"},
        ],
        "text": "cat",
    }


def test_questions_have_one_right_answer() -> None:
    for seed in range(20):
        for chat in scenes.questions(PAIR, random.Random(seed)):
            if chat.prompt == "How many shapes are there?":
                assert chat.answer == "two"
            elif chat.prompt == "What color is the star?":
                assert chat.answer == "blue"
            elif chat.prompt == "What is the red shape?":
                assert chat.answer == "circle"
            elif chat.kind == "exists":
                asked = chat.prompt.removeprefix("Is there a ").rstrip("?")
                assert (chat.answer == "yes") == (asked in ("red circle", "blue star"))
    twins = scenes.Scene((THING, scenes.Thing(1, "circle", "blue", "small")))
    prompts = {chat.prompt for chat in scenes.questions(twins, random.Random(0))}
    assert "What color is the circle?" not in prompts


def test_grades_tell_right_from_wrong() -> None:
    right = scenes.describe(PAIR)
    assert scenes.grade_description(PAIR, right).all
    assert scenes.grade_description(PAIR, right.upper()).all
    swapped = right.replace("red", "?").replace("blue", "red").replace("?", "blue")
    grade = scenes.grade_description(PAIR, swapped)
    assert grade.shapes and grade.colors and grade.count and not grade.pairs
    assert not scenes.grade_description(PAIR, right.replace("star", "cross")).shapes
    assert not scenes.grade_description(PAIR, right.replace("two", "three")).count
    assert not scenes.grade_description(PAIR, right.replace("blue", "teal")).colors
    assert not any((g := scenes.grade_description(PAIR, "")).__dict__.values()) and not g.all
