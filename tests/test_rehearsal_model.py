"""The rehearsal model is the same everywhere, and its chat template asks what it can answer."""

import json
import random
import struct
from collections.abc import Mapping
from typing import Any

import jinja2.sandbox
import pytest

from rehearsal import model
from seatrial import haystack

# The revision that inventory/rehearsal pins. Another one means other weights, another tokenizer or
# another template: measure docs/rehearsal-model.md again before pinning it.
DIGEST = "c8870a92ba044ec6eb0ae4ca2657f90c9ac802c4edc7c7019a7b705b32559431"
PROSE = "The old mill stood by the river. The secret code is ZEBRA-4492-OMEGA. It rained."


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """Return the model's files."""
    return model.files()


def rendered(*messages: Mapping[str, str]) -> str:
    """Return what the chat template makes of messages."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(model.CHAT_TEMPLATE)
    return template.render(messages=messages, add_generation_prompt=True)


def test_the_output_is_pinned(files: dict[str, bytes]) -> None:
    """Same bytes on every machine and in every run."""
    assert model.digest(files) == DIGEST
    assert sum(map(len, files.values())) < 20 * 2**20


def test_the_weights_are_a_readable_safetensors_file(files: dict[str, bytes]) -> None:
    """Offsets are gapless, shapes match them, and every index layer leaves the stream alone."""
    data = files["model.safetensors"]
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    body = memoryview(data)[8 + length :]
    end = 0
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        size = 4
        for side in entry["shape"]:
            size *= side
        assert (first, last - first) == (end, size), name
        end = last
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        if is_output and int(name.split(".")[2]) >= model.FIRST_INDEX_LAYER:
            assert not any(body[first:last]), name
    assert end == len(body)


def test_the_configuration_has_what_the_backend_reads(files: dict[str, bytes]) -> None:
    """Values of the base release, and as many layers as the widest index key needs."""
    config = json.loads(files["config.json"])
    assert config["index_topk"] == 1024
    assert config["index_key_dtype"] == "fp8_e4m3"
    row_bytes = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    index_layers = config["num_hidden_layers"] - config["index_sparse_layer"] - 1
    assert index_layers * row_bytes == 4 * config["index_head_dim"]


def test_the_vocabulary_covers_every_byte_once(files: dict[str, bytes]) -> None:
    """Any text can be written, and no token stands twice."""
    vocabulary = [token for token, _ in json.loads(files["tokenizer.json"])["model"]["vocab"]]
    assert len(set(vocabulary)) == len(vocabulary)
    assert {model.written(chr(byte)) for byte in range(128)} <= set(vocabulary)
    assert {chr(point) for point in model.byte_alphabet()} <= set(vocabulary)


def test_a_haystack_is_made_of_whole_words() -> None:
    """Words that the tokenizer cuts up would make prompts longer than they look."""
    assert set(haystack.WORDS) <= set(model.WORDS)


def test_codes_keep_their_distance() -> None:
    """Two names never share a code, nor nearly so."""
    tokens = model.Tokens()
    names = sorted({tokens.key_name(token) for token in tokens.text})
    made = list(model.codes(names, len(model.KEY), random.Random(1)).values())
    closest = max(sum(a * b for a, b in zip(made[0], other, strict=True)) for other in made[1:])
    assert closest < 0.7


@pytest.mark.parametrize(
    "question",
    [
        "What is the secret code?",
        "What is the secret code",
        "what's the secret code?",
        "What was the secret code?",
        "Please tell me the secret code",
        "Please tell me the secret code.",
        "Tell me the secret code.",
        "Tell me what the secret code is.",
        "Can you tell me the secret code?",
        "Do you remember the secret code?",
        "What is the secret code mentioned above?",
        "What is the secret code in the text above?",
        "Recall: the secret code",
        "Recall the secret code.",
        "Repeat the secret code.",
        "the secret code?",
        "the secret code is",
        "the secret code is:",
    ],
)
@pytest.mark.parametrize("between", [" ", "\n", "\n\n"])
def test_a_question_becomes_the_sentence_that_it_asks_for(question: str, between: str) -> None:
    """The model continues the sentence; the question itself is taken out of the prompt."""
    prompt = rendered({"role": "user", "content": f"{PROSE}{between}{question}"})
    assert prompt == f"{PROSE}\nthe secret code is"


def test_earlier_turns_read_as_the_sentences_that_they_were() -> None:
    """System text, question and answer stand in the prompt in their order."""
    prompt = rendered(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{PROSE} What is the secret code?"},
        {"role": "assistant", "content": "ZEBRA-4492-OMEGA"},
        {"role": "user", "content": "What is the secret code?"},
    )
    assert prompt.endswith("the secret code is ZEBRA-4492-OMEGA\n\nthe secret code is")


def test_what_is_no_question_stays_as_it_is() -> None:
    """A message that asks for nothing is passed on."""
    assert rendered({"role": "user", "content": "hello"}) == "hello\n"
