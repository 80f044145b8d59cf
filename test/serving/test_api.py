"""What clients of SGLang use works with D3TREE, and what cannot work yet is refused with a sentence.

Most of it runs on the letters target: its text is nonsense, but every comparison is exact.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from support import models
from support.calls import at_once, output_ids, stream
from support.exact import greedy_ids, model_of, tokenizer_of
from support.media import web_server
from support.prompts import IMAGE, data_uri, drawn, png
from support.servers import Server

pytestmark = pytest.mark.timeout(600)

PROMPT = "tao"
PICTURE = drawn(1, 90, 90)


@pytest.fixture(scope="module")
def client(letters: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{letters.url}/v1", api_key="none", timeout=300, max_retries=0)


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


# ---------------------------------------------------------------- answers


def test_streams_add_up_to_the_whole_answer(letters: Server) -> None:
    whole = letters.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    chunks = list(stream(letters, PROMPT, max_new_tokens=40, ignore_eos=True))
    assert len(chunks) > 3
    assert all(chunks[i + 1]["text"].startswith(chunks[i]["text"]) for i in range(len(chunks) - 1))
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]


def test_openai_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": [image_part(data_uri(PICTURE)), text_part(PROMPT)]}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**request)
    deltas, usage = [], None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        deltas += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_openai_completion_equals_generate(client: openai.OpenAI, letters: Server) -> None:
    native = letters.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    answer = client.completions.create(
        model="default", prompt=PROMPT, max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == native["text"]
    assert answer.usage.completion_tokens == 30
    pieces = client.completions.create(
        model="default", prompt=PROMPT, max_tokens=30, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == native["text"]


def test_n_answers(client: openai.OpenAI, letters: Server) -> None:
    greedy = letters.generate(PROMPT, n=2, max_new_tokens=16, ignore_eos=True)
    assert output_ids(greedy) == [letters.generate(PROMPT, max_new_tokens=16, ignore_eos=True)["output_ids"]] * 2
    sampled = client.completions.create(
        model="default", prompt=PROMPT, n=4, max_tokens=24, temperature=1, extra_body={"ignore_eos": True}
    )
    assert sorted(choice.index for choice in sampled.choices) == [0, 1, 2, 3]
    assert len({choice.text for choice in sampled.choices}) > 1


def test_list_of_prompts_is_answered_in_order(letters: Server) -> None:
    prompts = ["et", "tao", "aaaa", "o"]
    batch = letters.generate(prompts, max_new_tokens=16, ignore_eos=True)
    assert output_ids(batch) == [letters.generate(p, max_new_tokens=16, ignore_eos=True)["output_ids"] for p in prompts]


def test_token_ids_as_prompt(letters: Server) -> None:
    ids = tokenizer_of(models.letters_target())(PROMPT).input_ids
    by_ids = letters.generate(ids, max_new_tokens=16, ignore_eos=True)
    assert by_ids["output_ids"] == letters.generate(PROMPT, max_new_tokens=16, ignore_eos=True)["output_ids"]


# ---------------------------------------------------------------- where an answer ends


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 13])
def test_max_tokens_is_exact(limit: int, letters: Server) -> None:
    """A round may emit more tokens than are left; the surplus must not be seen."""
    answer = letters.generate(PROMPT, max_new_tokens=limit, ignore_eos=True)
    assert answer["output_ids"] == letters.generate(PROMPT, max_new_tokens=20, ignore_eos=True)["output_ids"][:limit]
    assert answer["meta_info"]["completion_tokens"] == limit
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": limit}


def test_stop_string_in_the_middle_of_a_round(letters: Server) -> None:
    whole = letters.generate(PROMPT, max_new_tokens=40, ignore_eos=True)["text"]
    for start in range(5, 12):
        stop = whole[start : start + 3]
        answer = letters.generate(PROMPT, max_new_tokens=40, ignore_eos=True, stop=stop)
        assert answer["text"] == whole[: whole.index(stop)]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    several = letters.generate(PROMPT, max_new_tokens=40, ignore_eos=True, stop=["zzz", whole[6:9]])
    assert several["text"] == whole[: whole.index(whole[6:9])]


def test_openai_stop(client: openai.OpenAI, letters: Server) -> None:
    whole = letters.generate(PROMPT, max_new_tokens=40, ignore_eos=True)["text"]
    answer = client.completions.create(model="default", prompt=PROMPT, max_tokens=40, temperature=0, stop=[whole[6:9]])
    assert answer.choices[0].text == whole[: whole.index(whole[6:9])]
    assert answer.choices[0].finish_reason == "stop"


def test_stop_token_ids(letters: Server) -> None:
    ids = letters.generate("et", max_new_tokens=40, ignore_eos=True)["output_ids"]
    rare = min(set(ids), key=ids.count)
    # ignore_eos would switch all stop tokens off.
    answer = letters.generate("et", max_new_tokens=40, stop_token_ids=[rare])
    assert answer["output_ids"] == ids[: ids.index(rare) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": rare}


def test_ignore_eos(stock: Server, d3tree: Server) -> None:
    """The real model ends a short answer; told to ignore its end token it goes on, as stock does."""
    prompt = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    ended = d3tree.generate(prompt, max_new_tokens=60)
    assert ended["meta_info"]["finish_reason"]["type"] == "stop"
    endless = d3tree.generate(prompt, max_new_tokens=60, ignore_eos=True)
    assert endless["meta_info"]["completion_tokens"] == 60
    assert endless["output_ids"] == stock.generate(prompt, max_new_tokens=60, ignore_eos=True)["output_ids"]


# ---------------------------------------------------------------- sampling parameters


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 2}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_sampling_parameters_are_taken(options: dict[str, Any], letters: Server) -> None:
    answer = letters.generate(PROMPT, **{"temperature": 1.0, **options}, max_new_tokens=24, ignore_eos=True)
    assert len(answer["output_ids"]) == 24


def test_top_k_1_is_greedy(letters: Server) -> None:
    greedy = letters.generate(PROMPT, max_new_tokens=32, ignore_eos=True)
    assert (
        letters.generate(PROMPT, temperature=1, top_k=1, max_new_tokens=32, ignore_eos=True)["output_ids"]
        == (greedy["output_ids"])
    )


def test_logit_bias_moves_the_target_not_the_draft(letters: Server) -> None:
    """Greedy with a bias equals the exact greedy text under the same bias."""
    import torch

    target, bias = models.letters_target(), {19: -2.5, 18: 1.5}
    ids = tokenizer_of(target)(PROMPT).input_ids
    context = torch.tensor([ids])
    offset = torch.zeros(64)
    offset[list(bias)] = torch.tensor(list(bias.values()))
    with torch.inference_mode():
        for _ in range(32):
            logits = model_of(target)(input_ids=context).logits[:, -1] + offset
            context = torch.cat([context, logits.argmax(-1, keepdim=True)], dim=1)
    expected = context[0, len(ids) :].tolist()
    assert expected != greedy_ids(target, ids, 32)
    named = {str(token): value for token, value in bias.items()}
    answers = [letters.generate(PROMPT, max_new_tokens=32, ignore_eos=True, logit_bias=named)]
    # The same beside requests without a bias.
    parameters = [{"temperature": 0, "max_new_tokens": 32, "ignore_eos": True} for _ in range(3)]
    parameters[1]["logit_bias"] = named
    mixed = letters.post("/generate", {"text": [PROMPT] * 3, "sampling_params": parameters}).json()
    assert answers[0]["output_ids"] == mixed[1]["output_ids"] == expected
    assert mixed[0]["output_ids"] == greedy_ids(target, ids, 32)


# ---------------------------------------------------------------- images


def test_image_as_url_data_uri_base64_and_file_is_the_same_image(letters: Server, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(png(PICTURE))
    with web_server({"/picture.png": png(PICTURE)}) as url:
        sources = [
            data_uri(PICTURE),
            f"{url}/picture.png",
            f"file://{tmp_path}/picture.png",
            str(tmp_path / "picture.png"),
            base64.b64encode(png(PICTURE)).decode(),
        ]
        answers = [
            letters.generate(f"{IMAGE}{PROMPT}", image_data=source, max_new_tokens=24, ignore_eos=True)
            for source in sources
        ]
        chats = [
            letters.chat([image_part(source), text_part(PROMPT)], max_tokens=24, ignore_eos=True)
            for source in sources[:3]
        ]
    assert all(answer["output_ids"] == answers[0]["output_ids"] for answer in answers)
    assert answers[0]["meta_info"]["prompt_tokens"] == 16 + 2 + len(PROMPT)
    assert len({chat["choices"][0]["message"]["content"] for chat in chats}) == 1
    without = letters.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert without["output_ids"] != answers[0]["output_ids"]


def test_several_images_in_one_message_count_and_keep_their_order(letters: Server) -> None:
    one, two = data_uri(drawn(2, 80, 80)), data_uri(drawn(3, 120, 120))

    def ask(*images: str) -> dict[str, Any]:
        return letters.chat([*map(image_part, images), text_part(PROMPT)], max_tokens=32, ignore_eos=True)

    single, pair, swapped = ask(one), ask(one, two), ask(two, one)
    assert pair["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"] + 18
    texts = [answer["choices"][0]["message"]["content"] for answer in (pair, swapped)]
    assert texts[0] != texts[1]


def test_n_answers_about_one_image(letters: Server) -> None:
    options = {"image_data": data_uri(PICTURE), "max_new_tokens": 16, "ignore_eos": True}
    single = letters.generate(IMAGE + PROMPT, **options)
    assert output_ids(letters.generate(IMAGE + PROMPT, n=3, **options)) == [single["output_ids"]] * 3


def test_multi_turn_with_an_image_in_each_turn(stock: Server, d3tree: Server) -> None:
    messages: list[dict[str, Any]] = []
    for turn, question in enumerate(("What do you see?", "And here?", "Compare both.")):
        picture = [image_part(data_uri(drawn(40 + turn, 100, 100)))] if turn < 2 else []
        messages.append({"role": "user", "content": [*picture, text_part(question)]})
        ours = d3tree.chat(messages, max_tokens=20)
        theirs = stock.chat(messages, max_tokens=20)
        assert ours["choices"][0]["message"] == theirs["choices"][0]["message"]
        assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": ours["choices"][0]["message"]["content"]})


def test_frontend_language(letters: Server, tmp_path: Path) -> None:
    import sglang as sgl
    from sglang.lang.chat_template import get_chat_template

    (tmp_path / "picture.png").write_bytes(png(PICTURE))

    @sgl.function
    def look(s: Any, path: str) -> None:
        s += sgl.user(sgl.image(path) + PROMPT)
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))

    @sgl.function
    def tell(s: Any) -> None:
        s += PROMPT + sgl.gen("first", max_tokens=8, temperature=0, ignore_eos=True)
        s += sgl.gen("second", max_tokens=8, temperature=0, ignore_eos=True)

    endpoint = sgl.RuntimeEndpoint(letters.url)
    # Guessed from the model's path otherwise; a wrong placeholder is refused, as the last lines show.
    guessed, endpoint.chat_template = endpoint.chat_template, get_chat_template("qwen2-vl")
    told = tell.run(backend=endpoint)
    assert told["first"] == letters.generate(PROMPT, max_new_tokens=8, ignore_eos=True)["text"]
    assert told["second"] == letters.generate(PROMPT + told["first"], max_new_tokens=8, ignore_eos=True)["text"]
    seen = look.run(path=str(tmp_path / "picture.png"), backend=endpoint)
    assert seen["answer"].strip()
    batch = look.run_batch([{"path": str(tmp_path / "picture.png")}] * 3, backend=endpoint)
    assert [state["answer"] for state in batch] == [seen["answer"]] * 3
    endpoint.chat_template = guessed
    lost = look.run(path=str(tmp_path / "picture.png"), backend=endpoint)
    assert "placeholder" in str(lost.error())


# ---------------------------------------------------------------- what is refused

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "return_logprob": ({"return_logprob": True}, "log probabilities"),
    "return_hidden_states": ({"return_hidden_states": True}, "hidden states"),
    "frequency_penalty": ({"sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
    "presence_penalty": ({"sampling_params": {"presence_penalty": 0.5}}, "presence_penalty"),
    "repetition_penalty": ({"sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
    "min_new_tokens": ({"sampling_params": {"min_new_tokens": 4}}, "min_new_tokens"),
    "json_schema": ({"sampling_params": {"json_schema": json.dumps(SCHEMA)}}, "json_schema"),
    "regex": ({"sampling_params": {"regex": "[ab]+"}}, "regex"),
    "ebnf": ({"sampling_params": {"ebnf": 'root ::= "a"'}}, "ebnf"),
    "custom_logit_processor": ({"custom_logit_processor": "{}"}, "custom"),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_unsupported_feature_is_refused_while_neighbours_go_on(feature: str, letters: Server) -> None:
    extra, word = REFUSED[feature]
    parameters = {"temperature": 0, "max_new_tokens": 8, **extra.get("sampling_params", {})}
    body = {"text": PROMPT, **extra, "sampling_params": parameters}
    expected = letters.generate(PROMPT, max_new_tokens=48, ignore_eos=True)["output_ids"]
    with ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(letters.generate, PROMPT, max_new_tokens=48, ignore_eos=True)
        response = letters.post("/generate", body)
        assert neighbour.result()["output_ids"] == expected
    assert response.status_code == 400, response.text[:500]
    assert word in response.text and re.search(r"\.\"", response.text), response.text


OPENAI_REFUSED: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "min_tokens": {"min_tokens": 4},
    "regex": {"regex": "[ab]+"},
}


@pytest.mark.parametrize("feature", OPENAI_REFUSED)
def test_unsupported_feature_over_the_openai_api(feature: str, letters: Server) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
    for streamed in (False, True):
        response = letters.post("/v1/chat/completions", {**body, **OPENAI_REFUSED[feature], "stream": streamed})
        assert response.status_code == 400, response.text[:500]
        assert "d3tree does not support" in response.text, response.text


def test_refused_native_stream_says_400_in_its_first_event(letters: Server) -> None:
    """``/generate`` streams begin with 200 in SGLang, whatever the request."""
    response = letters.post("/generate", {"text": PROMPT, "return_logprob": True, "stream": True})
    error = json.loads(response.text.splitlines()[0].removeprefix("data: "))["error"]
    assert error["code"] == 400 and "d3tree does not support" in error["message"]


def test_refused_request_does_not_end_its_batch(letters: Server) -> None:
    """One list of prompts whose middle one asks for the impossible, and requests of others meanwhile."""
    expected = letters.generate(PROMPT, max_new_tokens=24, ignore_eos=True)["output_ids"]
    ask: list[Callable[[], Any]] = [
        lambda: letters.generate(PROMPT, max_new_tokens=24, ignore_eos=True)["output_ids"],
        lambda: letters.post("/generate", {"text": PROMPT, "return_logprob": True}).status_code,
    ] * 6
    answers = at_once(lambda call: call(), ask, concurrency=12)
    assert answers == [expected, 400] * 6


# ---------------------------------------------------------------- what is reported


def test_request_reports_its_own_rounds(letters: Server) -> None:
    answer = letters.generate(PROMPT, max_new_tokens=49, ignore_eos=True)
    info = answer["meta_info"]
    # The first token comes from the prefill, every other one from a verify round.
    assert info["completion_tokens"] == 49
    assert info["spec_verify_ct"] < 48
    assert info["spec_accept_length"] == pytest.approx(49 / info["spec_verify_ct"], abs=0.5)
    assert info["spec_num_correct_drafts"] == sum(
        depth * rounds for depth, rounds in enumerate(info["spec_correct_drafts_histogram"])
    )
    assert sum(info["spec_correct_drafts_histogram"]) == info["spec_verify_ct"]


def test_usage_counts_emitted_tokens_only(letters: Server) -> None:
    body = {"max_tokens": 21, "ignore_eos": True, "return_spec_tokens_details": True}
    answer = letters.chat(PROMPT, **body)
    assert answer["usage"]["completion_tokens"] == 21
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 21
    details = answer["sglext"]["spec_tokens_details"]
    assert 1 <= details["spec_accept_length"] <= 8
    assert 0 < details["spec_verify_ct"] < 21


def test_server_info_reports_accept_length_and_rows(letters: Server) -> None:
    before = letters.internal_state()["d3tree"]
    answer = letters.generate(PROMPT, max_new_tokens=49, ignore_eos=True)
    after = letters.internal_state()["d3tree"]
    rounds = after["rounds"] - before["rounds"]
    assert rounds == answer["meta_info"]["spec_verify_ct"]
    assert after["max_rows"] == 45 and after["policy"] == "d3tree"
    assert 1 < after["accept_length"] < 8
    assert 1 < after["rows_per_request"] <= 45
    assert after["rows_per_round"] >= after["rows_per_request"]


def test_decode_log_line_shows_the_accept_length(letters: Server) -> None:
    letters.generate(["et"] * 4, max_new_tokens=400, ignore_eos=True)
    lines = [line for line in letters.log().splitlines() if "Decode batch" in line]
    assert lines and all(re.search(r"accept len: [1-7]\.\d\d", line) for line in lines), lines[-3:]
