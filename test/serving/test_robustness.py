"""A request that cannot be served fails alone with 4xx; its neighbours finish right and no KV slot is lost."""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from support import models
from support.calls import at_once, hang_up_after, output_ids
from support.exact import greedy_ids, tokenizer_of
from support.media import silent_server, web_server
from support.prompts import IMAGE, data_uri, drawn, png
from support.servers import Server, generate_body

pytestmark = pytest.mark.timeout(600)

PROMPT = "tao"
LENGTH = 48


@pytest.fixture(scope="module")
def expected() -> list[int]:
    target = models.letters_target()
    return greedy_ids(target, tokenizer_of(target)(PROMPT).input_ids, LENGTH)


def ask(server: Server) -> list[int]:
    ids: list[int] = server.generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True)["output_ids"]
    return ids


def assert_nothing_leaked(server: Server, patience: float = 30) -> None:
    """KV slots neither free nor in the radix cache: none, exactly."""
    deadline = time.monotonic() + patience
    while (used := server.used_tokens()) != 0:
        assert time.monotonic() < deadline, f"{used} KV slots are still in use on an idle server"
        time.sleep(0.5)


def test_used_tokens_are_seen_while_a_request_runs(letters: Server) -> None:
    """The number that the other tests compare with 0 is not always 0."""
    worker = threading.Thread(target=letters.generate, args=("et",), kwargs={"max_new_tokens": 600, "ignore_eos": True})
    worker.start()
    seen = 0
    while worker.is_alive():
        seen = max(seen, letters.used_tokens())
    worker.join()
    assert seen > 0
    assert_nothing_leaked(letters)


# ---------------------------------------------------------------- requests that cannot be served


def broken_image() -> str:
    """Ten megabytes that begin like a PNG and go on as noise."""
    noise = random.Random(0).randbytes(10 * 1024 * 1024)
    return "data:image/png;base64," + base64.b64encode(png(drawn(0, 64, 64))[:60] + noise).decode()


def cut_off_image() -> str:
    return "data:image/png;base64," + base64.b64encode(png(drawn(0, 200, 200))[:300]).decode()


BAD_IMAGES: dict[str, Callable[[], str]] = {
    "ten broken megabytes": broken_image,
    "cut off in the middle": cut_off_image,
    "no image at all": lambda: "data:image/png;base64," + base64.b64encode(b"hello").decode(),
    "no base64": lambda: "data:image/png;base64,%%%%",
    "connection refused": lambda: "http://127.0.0.1:9/picture.png",
    "file that is not there": lambda: "/nothing/here.png",
}


def assert_refused_beside_neighbours(
    server: Server, expected: list[int], path: str, body: dict[str, Any], words: str = ""
) -> str:
    """The request fails with 4xx while four others, started before it, finish right."""
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(ask, server) for _ in range(4)]
        response = server.post(path, body, timeout=120)
        assert [neighbour.result() for neighbour in neighbours] == [expected] * 4
    assert 400 <= response.status_code < 500, f"{response.status_code}: {response.text[:500]}"
    assert words in response.text, response.text[:500]
    assert len(response.text) < 2000
    assert_nothing_leaked(server)
    return response.text


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_unreadable_image(kind: str, letters: Server, expected: list[int]) -> None:
    body = generate_body(f"{IMAGE}{PROMPT}", image_data=BAD_IMAGES[kind]())
    assert_refused_beside_neighbours(letters, expected, "/generate", body)


@pytest.mark.parametrize("kind", ["ten broken megabytes", "file that is not there"])
def test_unreadable_image_in_a_chat(kind: str, letters: Server, expected: list[int]) -> None:
    content = [{"type": "image_url", "image_url": {"url": BAD_IMAGES[kind]()}}, {"type": "text", "text": PROMPT}]
    body = {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    assert_refused_beside_neighbours(letters, expected, "/v1/chat/completions", body)


def test_image_server_that_does_not_answer(letters: Server, expected: list[int]) -> None:
    with silent_server() as url:
        start = time.monotonic()
        body = generate_body(f"{IMAGE}{PROMPT}", image_data=f"{url}/picture.png")
        assert_refused_beside_neighbours(letters, expected, "/generate", body)
        assert time.monotonic() - start < 60


def test_image_url_that_is_not_found(letters: Server, expected: list[int]) -> None:
    with web_server({}) as url:
        body = generate_body(f"{IMAGE}{PROMPT}", image_data=f"{url}/picture.png")
        assert_refused_beside_neighbours(letters, expected, "/generate", body, "404")


def test_prompt_longer_than_the_context(letters: Server, expected: list[int]) -> None:
    body = generate_body("et" * 4200)
    assert_refused_beside_neighbours(letters, expected, "/generate", body, "8400")
    messages = [{"role": "user", "content": "et" * 4200}]
    chat = {"model": "default", "messages": messages, "max_tokens": 8}
    assert_refused_beside_neighbours(letters, expected, "/v1/chat/completions", chat)


@pytest.mark.parametrize(
    ("text", "images"),
    [(PROMPT, 1), (f"{IMAGE}{PROMPT}", 2), (f"{IMAGE}{PROMPT}{IMAGE}", 1), ("<image>" + PROMPT, 1)],
    ids=[
        "no placeholder",
        "more images than placeholders",
        "more placeholders than images",
        "another model's placeholder",
    ],
)
def test_image_that_the_processor_would_drop(text: str, images: int, letters: Server, expected: list[int]) -> None:
    pictures = [data_uri(drawn(i, 70, 70)) for i in range(images)]
    body = generate_body(text, image_data=pictures)
    assert_refused_beside_neighbours(letters, expected, "/generate", body, "placeholder")


def test_dropped_image_in_a_list_of_prompts(letters: Server) -> None:
    picture = data_uri(drawn(0, 70, 70))
    right = letters.generate([IMAGE + PROMPT, PROMPT], image_data=[picture, None], max_new_tokens=4)
    assert right[0]["meta_info"]["prompt_tokens"] == right[1]["meta_info"]["prompt_tokens"] + 18
    body = generate_body([IMAGE + PROMPT, PROMPT], image_data=[picture, picture], max_new_tokens=4)
    assert letters.post("/generate", body).status_code == 400
    assert_nothing_leaked(letters)


# ---------------------------------------------------------------- clients that leave


def test_client_that_disconnects_in_the_middle(letters: Server, expected: list[int]) -> None:
    def leave(_: int) -> None:
        hang_up_after(letters, "et", 2, max_new_tokens=3000, ignore_eos=True)

    with ThreadPoolExecutor(8) as pool:
        leaving = [pool.submit(leave, i) for i in range(4)]
        neighbours = [pool.submit(ask, letters) for _ in range(4)]
        assert [neighbour.result() for neighbour in neighbours] == [expected] * 4
        for client in leaving:
            client.result()
    # The server must notice: nobody waits for 3000 tokens.
    assert_nothing_leaked(letters)


def test_abort_request_route(letters: Server, expected: list[int]) -> None:
    with ThreadPoolExecutor(2) as pool:
        doomed = pool.submit(letters.generate, "et", rid="doomed", max_new_tokens=3000, ignore_eos=True)
        neighbour = pool.submit(ask, letters)
        time.sleep(1)
        assert letters.post("/abort_request", {"rid": "doomed"}).status_code == 200
        assert doomed.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert neighbour.result() == expected
    assert_nothing_leaked(letters)


# ---------------------------------------------------------------- nothing leaks


def test_kv_pool_returns_to_its_start_after_hundreds_of_requests(letters: Server, expected: list[int]) -> None:
    """Finished, sampled, illustrated, refused and abandoned requests in one crowd, policies changed among them."""
    letters.flush_cache()
    assert_nothing_leaked(letters)
    rng = random.Random(5)
    pictures = [data_uri(drawn(i, 60 + 10 * i, 90)) for i in range(4)]

    def finish(i: int) -> None:
        assert ask(letters) == expected

    def sample(i: int) -> None:
        letters.generate("et" * rng.randrange(1, 20), temperature=1, max_new_tokens=rng.randrange(1, 60))

    def look(i: int) -> None:
        letters.generate(
            IMAGE + PROMPT, image_data=pictures[i % 4], max_new_tokens=rng.randrange(1, 30), ignore_eos=True
        )

    def abandon(i: int) -> None:
        hang_up_after(letters, "o" * rng.randrange(1, 20), rng.randrange(1, 4), max_new_tokens=500, ignore_eos=True)

    def refuse(i: int) -> None:
        assert letters.post("/generate", generate_body(PROMPT, return_logprob=True)).status_code == 400

    def change(i: int) -> None:
        letters.set_options(
            policy=rng.choice(["d3tree", "ddtree", "caddtree", "chain"]), threshold=rng.choice([0, 0.05])
        )

    crowd = [finish] * 60 + [sample] * 110 + [look] * 50 + [abandon] * 50 + [refuse] * 20 + [change] * 10
    rng.shuffle(crowd)
    try:
        at_once(lambda job: job[1](job[0]), list(enumerate(crowd)), concurrency=24)
    finally:
        letters.set_options(policy="d3tree", threshold=0)
    assert_nothing_leaked(letters)
    letters.flush_cache()
    assert_nothing_leaked(letters)
    assert ask(letters) == expected


def test_more_requests_than_the_kv_pool_holds(letters: Server) -> None:
    """The scheduler takes back requests in the middle and starts them again later; their text stays right."""
    target = models.letters_target()
    prompts = [PROMPT, "et", "o", "aaaa"]
    length = 320
    texts = {p: greedy_ids(target, tokenizer_of(target)(p).input_ids, 48) for p in prompts}
    answers = letters.generate(prompts * 12, timeout=500, max_new_tokens=length, ignore_eos=True)
    for i, ids in enumerate(output_ids(answers)):
        assert len(ids) == length
        assert ids[:48] == texts[prompts[i % 4]]
        assert ids == answers[i % 4]["output_ids"]
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0, "the pool was large enough for all"
    assert_nothing_leaked(letters)


def test_health_and_models_answer_under_load(letters: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        load = [pool.submit(letters.generate, "et", max_new_tokens=200, ignore_eos=True) for _ in range(8)]
        for path in ("/health", "/v1/models", "/server_info"):
            assert requests.get(letters.url + path, timeout=60).status_code == 200
        assert len({tuple(job.result()["output_ids"]) for job in load}) == 1
