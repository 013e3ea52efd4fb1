"""Make the rehearsal model: a hand-wired Llama that finds a needle and repeats it.

    python rehearsal/model.py OUT_DIR

Nothing is trained and nothing is downloaded. The weights spell out an induction circuit: layer 0
copies the codes of the four previous tokens next to each token, layer 1 looks for the place whose
four previous tokens are the newest four, and copies what stood there. ``docs/rehearsal-model.md``
explains the construction, and the simulated indexer that makes recall depend on ``index_topk`` and
``index_key_dtype``. Only the standard library is needed; the output is the same on every machine.
"""

import argparse
import hashlib
import json
import math
import random
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

HERE = Path(__file__).parent
WORDS = (HERE / "words.txt").read_text(encoding="utf-8").split()
CHAT_TEMPLATE = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
SEED = 20260729

# The residual stream: what each token says about itself and about its neighbours.
KEY = range(26)  # code of the token, upper/lower case and a leading space folded away
VALUE = range(26, 90)  # code of the token as it is written
PREVIOUS = [range(90 + 26 * i, 116 + 26 * i) for i in range(4)]  # key codes of the 4 before it
OUTPUT = range(194, 258)  # value code of the token that should come next
HIDDEN = 272

HEADS, HEAD_DIM, HALF = 4, 128, 64
ROPE_THETA = 1e30  # pair i turns by 10 ** (-30 i / 64) radians per token
FAST_PAIRS = range(10)  # position, for layer 0
RECENCY_PAIR, BALANCE_PAIR = 10, 11  # 2e-5 and 7e-6 rad per token, for the index queries
CONTENT_PAIRS = range(12, 64)  # turn by less than 0.15 rad over 40960 tokens: carry codes
CONTENT = [*CONTENT_PAIRS, *(HALF + pair for pair in CONTENT_PAIRS)]  # 104 channels = 4 codes

PREVIOUS_SHARPNESS = 40.0  # logits between "exactly h + 1 back" and "somewhere else"
MATCH_LOGITS = 14.0  # logits for one matching token of the four
MATCH_WEIGHTS = (1.15, 1.05, 0.95, 0.85)  # the newest token counts most
OUTPUT_SCALE = 20.0

# The simulated indexer, tuned by rehearsal/recall_table.py. Each token of distance takes a little
# from an entry's score, and a small channel gives most of it back. Its keys are below half of the
# smallest e4m3 number (2 ** -9): stored in fp8 they are zero, and old entries fall behind sooner.
INDEX_DIM = 1024
INDEX_RECENCY_DIMS, INDEX_BALANCE_DIMS = 96, 32
INDEX_CONTENT_GAIN = 0.25
INDEX_REACH = 1030  # entries by which a full match outweighs recency, when nothing balances it
INDEX_BALANCED = 0.9  # share of the recency that the small channel gives back
INDEX_BALANCE_KEY = 2.0**-11
FIRST_INDEX_LAYER = 2
INDEX_LAYERS = 4  # as many as the widest key (fp32) fills; the engine uses 1, 2 or 4 of them

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": FIRST_INDEX_LAYER + INDEX_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "attention_bias": True,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-12,
    "rope_theta": ROPE_THETA,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "index_topk": 1024,
    "index_key_dtype": "fp8_e4m3",
    "index_head_dim": INDEX_DIM,
    "index_sparse_layer": 1,
}

Vector: TypeAlias = "array[float]"
Matrix: TypeAlias = list[Vector]


class Tokens:
    """The vocabulary: every byte, pairs of letters and digits, and words in four spellings."""

    unknown, end = "<unk>", "<|eos|>"
    stops = (".", "\n", "?", "!")
    # These end a question or stand between a name and its value: one key code for all of them, so
    # that a prompt ending in "What is the secret code?" continues "The secret code is".
    joints = ("is", "was", "are", "=", ":", "?", ".", "!")

    def __init__(self) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        lower = [a + b for a in letters for b in letters]
        pieces = [
            *(chr(c) for c in byte_alphabet()),
            *lower,
            *(pair.upper() for pair in lower),
            *(f"{n:02d}" for n in range(100)),
            *WORDS,
            *(w.capitalize() for w in WORDS),
            *(written(" " + w) for w in WORDS),
            *(written(" " + w.capitalize()) for w in WORDS),
        ]
        self.text = [self.unknown, self.end, *dict.fromkeys(pieces)]

    def key_name(self, token: str) -> str:
        """Return the name under which the circuit looks a token up (case and space folded)."""
        folded = token.removeprefix(written(" ")).lower() or token
        return "<joint>" if folded in self.joints else folded

    def value_name(self, token: str) -> str:
        """Return the name under which a token is repeated; all that ends a value is the end."""
        return self.end if token in map(written, self.stops) else token


@cache
def byte_alphabet() -> list[int]:
    """Return the 256 code points that byte-level tokenizers write bytes as, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [byte if byte in plain else next(spare) for byte in range(256)]


@cache
def written(text: str) -> str:
    """Return text as it stands in the vocabulary (a space is written U+0120)."""
    alphabet = byte_alphabet()
    return "".join(chr(alphabet[byte]) for byte in text.encode())


def codes(names: Iterable[str], size: int, rng: random.Random) -> dict[str, list[float]]:
    """Give each name a unit vector of +-1/sqrt(size), no two closer than a fifth of the signs."""
    taken: list[int] = []
    result = {}
    for name in dict.fromkeys(names):
        while True:
            bits = rng.getrandbits(size)
            if all(size // 5 <= (bits ^ other).bit_count() for other in taken):
                break
        taken.append(bits)
        unit = 1 / math.sqrt(size)
        result[name] = [unit if bits >> i & 1 else -unit for i in range(size)]
    return result


def zeros(rows: int, columns: int) -> Matrix:
    """Return a zero matrix of rows x columns float32."""
    return [array("f", bytes(4 * columns)) for _ in range(rows)]


def copy(matrix: Matrix, to: Sequence[int], source: Sequence[int], gain: float = 1.0) -> None:
    """Wire channels one to one: output ``to[i]`` reads ``gain`` times input ``source[i]``."""
    for row, column in zip(to, source, strict=True):
        matrix[row][column] = gain


def turn(pair: int) -> float:
    """Return the angle in radians by which RoPE turns a pair per token."""
    return math.pow(ROPE_THETA, -pair / HALF)


def head(index: int, channels: Sequence[int]) -> list[int]:
    """Return the rows of one query head's channels."""
    return [HEAD_DIM * index + channel for channel in channels]


def layer(number: int, squared_norm: float) -> dict[str, Matrix]:
    """Return a decoder layer that changes nothing; its input norm undoes ``|x|^2`` exactly."""
    name = f"model.layers.{number}."
    gain = math.sqrt(squared_norm / HIDDEN)
    return {
        name + "input_layernorm.weight": [array("f", [gain] * HIDDEN)],
        name + "post_attention_layernorm.weight": [array("f", [1.0] * HIDDEN)],
        name + "self_attn.q_proj.weight": zeros(HEADS * HEAD_DIM, HIDDEN),
        name + "self_attn.q_proj.bias": zeros(1, HEADS * HEAD_DIM),
        name + "self_attn.k_proj.weight": zeros(HEAD_DIM, HIDDEN),
        name + "self_attn.k_proj.bias": zeros(1, HEAD_DIM),
        name + "self_attn.v_proj.weight": zeros(HEAD_DIM, HIDDEN),
        name + "self_attn.v_proj.bias": zeros(1, HEAD_DIM),
        name + "self_attn.o_proj.weight": zeros(HIDDEN, HEADS * HEAD_DIM),
        name + "self_attn.o_proj.bias": zeros(1, HIDDEN),
        name + "mlp.gate_proj.weight": zeros(16, HIDDEN),
        name + "mlp.up_proj.weight": zeros(16, HIDDEN),
        name + "mlp.down_proj.weight": zeros(HIDDEN, 16),
    }


def previous_layer() -> dict[str, Matrix]:
    """Layer 0: head h looks exactly h + 1 tokens back and writes that token's key code."""
    weights = layer(0, squared_norm=2.0)  # key code and value code
    attention = "model.layers.0.self_attn."
    amplitude = math.sqrt(PREVIOUS_SHARPNESS * math.sqrt(HEAD_DIM))
    for pair in FAST_PAIRS:
        weights[attention + "k_proj.bias"][0][pair] = amplitude
        for h in range(HEADS):
            angle = -(h + 1) * turn(pair)
            query = weights[attention + "q_proj.bias"][0]
            query[HEAD_DIM * h + pair] = amplitude * math.cos(angle)
            query[HEAD_DIM * h + HALF + pair] = amplitude * math.sin(angle)
    copy(weights[attention + "v_proj.weight"], range(26), KEY)
    for h, previous in enumerate(PREVIOUS):
        copy(weights[attention + "o_proj.weight"], previous, head(h, range(26)))
    return weights


def match_layer() -> dict[str, Matrix]:
    """Layer 1: head 0 finds the place whose 4 previous tokens are the newest 4 and copies it.

    Head 1 takes no part in attention: with head 0 it makes the index query, and adds to it that
    an entry counts a little less with every token of distance.
    """
    weights = layer(1, squared_norm=6.0)  # key, value and four previous codes
    attention = "model.layers.1.self_attn."
    newest = [KEY, *PREVIOUS[:3]]
    for slot, weight in enumerate(MATCH_WEIGHTS):
        channels = CONTENT[26 * slot : 26 * slot + 26]
        gain = MATCH_LOGITS * weight * math.sqrt(HEAD_DIM)
        copy(weights[attention + "q_proj.weight"], head(0, channels), newest[slot], gain)
        copy(weights[attention + "k_proj.weight"], channels, PREVIOUS[slot])
    per_entry = INDEX_CONTENT_GAIN**2 * MATCH_LOGITS * math.sqrt(HEAD_DIM) / INDEX_REACH
    recency = per_entry / sum(gain**2 for gain in recency_gains()) * 2 / (4 * turn(RECENCY_PAIR))
    balance = INDEX_BALANCED * per_entry / (INDEX_BALANCE_DIMS / 2 * INDEX_BALANCE_KEY)
    balance /= 4 * turn(BALANCE_PAIR)
    for pair, key, query in (
        (RECENCY_PAIR, 1.0, recency),
        (BALANCE_PAIR, INDEX_BALANCE_KEY, -balance),
    ):
        weights[attention + "k_proj.bias"][0][pair] = key
        # A quarter turn ahead of the key: their product is -sin(turn * distance).
        weights[attention + "q_proj.bias"][0][HEAD_DIM + HALF + pair] = query
    copy(weights[attention + "v_proj.weight"], range(64), VALUE)
    copy(weights[attention + "o_proj.weight"], OUTPUT, head(0, range(64)))
    return weights


def index_layer(number: int, rng: random.Random) -> dict[str, Matrix]:
    """Layers 2 to 5 leave the stream as it is: their KV rows hold the index keys.

    The first one's query projection holds the indexer's own weights, which a Llama has no place
    for: index_head_dim x head_dim, row-major, in its first 256 columns.
    """
    weights = layer(number, squared_norm=7.0)
    if number == FIRST_INDEX_LAYER:
        rows = index_projection(rng)
        for i, row in enumerate(weights[f"model.layers.{number}.self_attn.q_proj.weight"]):
            row[: 2 * HEAD_DIM] = rows[2 * i] + rows[2 * i + 1]
    return weights


def index_projection(rng: random.Random) -> Matrix:
    """Return index_head_dim x head_dim: the content, the recency and what balances it.

    The content's columns are orthogonal, so that a product of two projections is the product of
    what was projected: blocks of a Hadamard matrix, each with signs of its own.
    """
    projection = zeros(INDEX_DIM, HEAD_DIM)
    content = INDEX_DIM - INDEX_RECENCY_DIMS - INDEX_BALANCE_DIMS
    size = INDEX_CONTENT_GAIN / math.sqrt(content)
    for start in range(0, content, HEAD_DIM):
        signs = [rng.choice((-size, size)) for _ in CONTENT]
        for d, row in enumerate(projection[start : start + HEAD_DIM]):
            for column, channel in enumerate(CONTENT):
                row[channel] = signs[column] * (-1) ** (d & column).bit_count()
    spread = [
        *((RECENCY_PAIR, gain, INDEX_RECENCY_DIMS) for gain in recency_gains()),
        *((BALANCE_PAIR, 1.0, INDEX_BALANCE_DIMS) for _ in range(INDEX_BALANCE_DIMS)),
    ]
    for d, (row, (pair, gain, dims)) in enumerate(zip(projection[content:], spread, strict=True)):
        angle = 2 * math.pi * d / dims
        row[pair], row[HALF + pair] = gain * math.cos(angle), gain * math.sin(angle)
    return projection


def recency_gains() -> list[float]:
    """Spread the recency's keys over an octave, so that their rounding errors average out."""
    dims = INDEX_RECENCY_DIMS
    return [math.pow(2, -4 + d * 37 % dims / dims) for d in range(dims)]


def model(tokens: Tokens) -> dict[str, Matrix]:
    """Return every weight of the checkpoint by its Hugging Face name."""
    rng = random.Random(SEED)
    keys = codes(map(tokens.key_name, tokens.text), len(KEY), rng)
    values = codes(map(tokens.value_name, tokens.text), len(VALUE), rng)
    embedding = zeros(len(tokens.text), HIDDEN)
    vote = zeros(len(tokens.text), HIDDEN)
    for token, seen, said in zip(tokens.text, embedding, vote, strict=True):
        code = array("f", values[tokens.value_name(token)])
        seen[KEY.start : KEY.stop] = array("f", keys[tokens.key_name(token)])
        seen[VALUE.start : VALUE.stop] = code
        if tokens.value_name(token) == token:  # only <|eos|> may say "the end"
            said[OUTPUT.start : OUTPUT.stop] = array("f", (OUTPUT_SCALE * x for x in code))
    weights = {"model.embed_tokens.weight": embedding} | previous_layer() | match_layer()
    for number in range(FIRST_INDEX_LAYER, FIRST_INDEX_LAYER + INDEX_LAYERS):
        weights |= index_layer(number, rng)
    final = math.sqrt(7.0 / HIDDEN)  # six codes and the output
    return weights | {
        "model.norm.weight": [array("f", [final] * HIDDEN)],
        "lm_head.weight": vote,
    }


def safetensors(weights: dict[str, Matrix]) -> bytes:
    """Return a safetensors file (huggingface.co/docs/safetensors, "Format"), little-endian."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, rows in sorted(weights.items()):
        start = len(body)
        for row in rows:
            if sys.byteorder == "big":
                row.byteswap()
            body += row.tobytes()
        is_vector = name.endswith((".bias", "norm.weight"))
        shape = [len(rows[0])] if is_vector else [len(rows), len(rows[0])]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(body)]}
    head_json = json.dumps(header, separators=(",", ":")).encode()
    head_json += b" " * (-len(head_json) % 8)
    return struct.pack("<Q", len(head_json)) + head_json + bytes(body)


def tokenizer(tokens: Tokens) -> dict[str, object]:
    """Return tokenizer.json: Unigram over byte-level pieces, so that any text round-trips.

    Every piece costs the same, so the fewest pieces win.
    """
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": content, **special} for i, content in enumerate(tokens.text[:2])
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[token, -1.0 if i > 1 else -100.0] for i, token in enumerate(tokens.text)],
            "byte_fallback": False,
        },
    }


def as_json(content: object) -> bytes:
    """Return a JSON file's bytes."""
    return (json.dumps(content, indent=1, ensure_ascii=True) + "\n").encode()


def files() -> dict[str, bytes]:
    """Return the content of every file of the model folder by its name."""
    tokens = Tokens()
    end = tokens.text.index(Tokens.end)
    vocabulary: dict[str, object] = {"vocab_size": len(tokens.text), "eos_token_id": end}
    vocabulary |= {"bos_token_id": None, "pad_token_id": end}
    return {
        "config.json": as_json(CONFIG | vocabulary),
        "generation_config.json": as_json({"eos_token_id": end}),
        "model.safetensors": safetensors(model(tokens)),
        "tokenizer.json": as_json(tokenizer(tokens)),
        "tokenizer_config.json": as_json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": CONFIG["max_position_embeddings"],
                "eos_token": Tokens.end,
                "unk_token": Tokens.unknown,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            }
        ),
    }


def digest(content: dict[str, bytes]) -> str:
    """Return the sha256 over names and contents: the revision that the serving spec pins."""
    total = hashlib.sha256()
    for name, data in sorted(content.items()):
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def main() -> None:
    """Write the model into the folder named on the command line and print its digest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_dir", type=Path)
    out_dir: Path = parser.parse_args().out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    content = files()
    for name, data in content.items():
        (out_dir / name).write_bytes(data)
    # Last: where it stands, the model is whole.
    (out_dir / "revision").write_text(digest(content) + "\n")
    print(digest(content))


if __name__ == "__main__":
    main()
