# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Writes episodes.jsonl: tool-use episodes as token ids and loss masks, as RL rollouts leave them.

    pip install dashscope tiktoken
    python examples/data/make_episodes.py                        # write episodes.jsonl
    python examples/data/make_episodes.py --check                # fail unless it is up to date
    python examples/data/make_episodes.py --show training-log    # print one episode in colour

What people and the model say is in conversations.md. What the tool answers is made here: every
Python block is run, in a process of its own and its episode's directory. The text is put into
Qwen's chat template and tokenised with Qwen's vocabulary (`qwen.tiktoken`, which the dashscope
package ships). The same input gives the same bytes.

One line of episodes.jsonl:

    {"name": str, "reward": 0 or 1, "tokens": [int, …], "loss_mask": [0 or 1, …]}

`loss_mask[t]` is 1 exactly where the model wrote token t, the `<|im_end|>` that closes its turn
included.
"""

import argparse
import base64
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, List, Tuple

try:
    import tiktoken
except ModuleNotFoundError:
    raise SystemExit("The tokeniser is missing: pip install dashscope tiktoken") from None

HERE = Path(__file__).resolve().parent
CONVERSATIONS = HERE / "conversations.md"
EPISODES = HERE / "episodes.jsonl"
RUN_SNIPPET = HERE / "run_snippet.py"

SNIPPET_SECONDS = 20
OUTPUT_CHARACTERS = 4000

VOCABULARY_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
# Part of the vocabulary's definition: byte pairs merge only inside the pieces that this cuts.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen 3's ids. The vocabulary of 151,936 words ends in ids that no token uses.
SPECIAL_TOKENS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<tool_response>": 151665,
    "</tool_response>": 151666,
}

SYSTEM_PROMPT = """You solve tasks with a Python tool and correct yourself when it fails. \
Files stay from one call to the next.

<tools>
{"name": "python", "description": "Runs a program and returns what it prints.", \
"parameters": {"code": "string"}}
</tools>

Call it with a JSON object between <tool_call> and </tool_call>."""


@dataclass
class Conversation:
    """One section of conversations.md.

    Attributes:
        name: The section's title.
        expect: Text that the last answer contains if the task was solved.
        files: Python that fills the working directory, may be empty.
        turns: (role, text) with the roles "user" and "assistant".
    """

    name: str
    expect: str
    files: str = ""
    turns: List[Tuple[str, str]] = field(default_factory=list)


def parse_conversations(text: str) -> Iterator[Conversation]:
    """Yields the sections of conversations.md in order."""
    for section in re.split(r"^# episode ", text, flags=re.MULTILINE)[1:]:
        head, *parts = re.split(r"^## (files|user|assistant)$", section, flags=re.MULTILINE)
        name, expect = re.fullmatch(r"(\S+)\nexpect: (.+)", head.strip()).groups()
        conversation = Conversation(name, expect)
        for role, content in zip(parts[::2], parts[1::2]):
            if role == "files":
                conversation.files = content
            else:
                conversation.turns.append((role, content.strip()))
        yield conversation


def run_snippet(code: str, directory: Path) -> str:
    """Runs `code` in `directory`, without the caller's environment and packages.

    Returns:
        What the code prints, tracebacks included.
    """
    process = subprocess.run(
        [sys.executable, "-s", "-S", "-B", "-X", "utf8", str(RUN_SNIPPET)],
        input=code,
        cwd=directory,
        env={"PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=SNIPPET_SECONDS,
    )
    output = process.stdout.replace(str(directory), "/workspace").strip("\n") or "(no output)"
    if len(output) > OUTPUT_CHARACTERS:
        left_out = len(output) - OUTPUT_CHARACTERS
        output = f"{output[:OUTPUT_CHARACTERS]}\n[{left_out} characters left out]"
    return output


def split_tool_call(text: str) -> Tuple[str, str]:
    """Splits an assistant's turn into what it says and the code that it runs, if any."""
    said, _, code = text.partition("```python\n")
    return said.strip(), code.removesuffix("```").strip()


def play(conversation: Conversation) -> Iterator[Tuple[str, bool]]:
    """Plays a conversation, tool calls included.

    Yields:
        Pieces of the chat template's text and whether the model wrote them.
    """
    yield f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n", False
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder).resolve()
        if conversation.files:
            said = run_snippet(conversation.files, directory)
            if said != "(no output)":
                raise RuntimeError(f"{conversation.name}: the files section printed: {said}")
        for role, text in conversation.turns:
            if role == "user":
                yield f"<|im_start|>user\n{text}<|im_end|>\n", False
                continue
            said, code = split_tool_call(text)
            yield "<|im_start|>assistant\n", False
            if not code:
                yield f"{said}<|im_end|>", True
                yield "\n", False
                continue
            call = json.dumps({"name": "python", "arguments": {"code": code}}, ensure_ascii=False)
            written = f"{said}\n<tool_call>\n" if said else "<tool_call>\n"
            yield f"{written}{call}\n</tool_call><|im_end|>", True
            output = run_snippet(code, directory)
            yield (
                f"\n<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n",
                False,
            )


def load_tokenizer() -> tiktoken.Encoding:
    """Returns Qwen's tokeniser, read from the installed dashscope package without importing it."""
    try:
        package = importlib.metadata.distribution("dashscope")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("Qwen's vocabulary is missing: pip install dashscope") from None
    path = Path(str(package.locate_file("dashscope/resources/qwen.tiktoken")))
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != VOCABULARY_SHA256:
        raise SystemExit(
            f"{path} has sha256 {digest}, expected {VOCABULARY_SHA256}: "
            "another vocabulary gives other token ids."
        )
    ranks = {}
    for line in content.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(
        "qwen", pat_str=PIECES, mergeable_ranks=ranks, special_tokens=SPECIAL_TOKENS
    )


def make_episode(conversation: Conversation, tokenizer: tiktoken.Encoding) -> dict:
    """Plays and tokenises one conversation; the result is one line of episodes.jsonl."""
    tokens, loss_mask = [], []
    for text, model_wrote in play(conversation):
        # Piece by piece: a rollout never merges a sampled token with its surroundings.
        piece = tokenizer.encode(text, allowed_special="all")
        tokens += piece
        loss_mask += [int(model_wrote)] * len(piece)
    reward = int(conversation.expect in conversation.turns[-1][1])
    return {"name": conversation.name, "reward": reward, "tokens": tokens, "loss_mask": loss_mask}


def show(conversation: Conversation) -> None:
    """Prints an episode's text, what the model wrote in green."""
    for text, model_wrote in play(conversation):
        print(f"\033[32m{text}\033[0m" if model_wrote else text, end="")


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument("--show", metavar="NAME", help="print the text of one episode and stop")
    arguments = parser.parse_args()

    conversations = list(parse_conversations(CONVERSATIONS.read_text(encoding="utf-8")))
    if arguments.show:
        named = [c for c in conversations if c.name == arguments.show]
        if not named:
            parser.error("--show: one of " + ", ".join(c.name for c in conversations))
        show(named[0])
        return
    tokenizer = load_tokenizer()
    episodes = [make_episode(conversation, tokenizer) for conversation in conversations]
    text = "".join(json.dumps(episode, separators=(",", ":")) + "\n" for episode in episodes)
    tokens = sum(len(episode["tokens"]) for episode in episodes)
    trained = sum(sum(episode["loss_mask"]) for episode in episodes)
    print(
        f"{len(episodes)} episodes, {tokens} tokens, "
        f"{trained} written by the model ({trained / tokens:.1%})"
    )
    if not arguments.check:
        EPISODES.write_text(text, encoding="utf-8")
    elif not EPISODES.exists() or EPISODES.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{EPISODES.name} is not what this script writes: run it without --check")


if __name__ == "__main__":
    main()
