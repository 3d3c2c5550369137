"""Patterns of unidiomatic prose, and the search for them in docstrings, comments and messages.

A match is a place to look at, not a verdict. The patterns apply to whole paragraphs, so line breaks do not matter.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Each pattern with the better form.
PATTERNS = {
    # Processes are not persons: a rank, any caller, no group.
    "person": r"\b(?:who|whom|whoever|nobody|somebody|everybody|anybody|no one|someone|everyone)\b",
    # Name the operation: send, receive, report, notify, log, return.
    "speech": r"\b(?:told|tells?|telling|says|said|heard|hears?|knows? of|asked|hand(?:s|ed)? (?:out|over|on))\b",
    # Start with a verb or a noun.
    "fragment": r"(?:^|(?<=[.!?] ))(?:Of|Also|Whether|What|Whose|Who|Their|That|Those|None:|Empty:) ?",
    # Write "or None if ...", or a Returns line.
    "glued value": r"(?<=[;.:] )(?:None|0|-1|empty): ",
    # Give the number: up to N, for N seconds.
    "vague amount": r"\b(?:so|as) (?:many|much|often|long)\b(?! as possible)|\bhowever (?:many|much|often|long)\b",
    # Repeat the noun.
    "pronoun": r"\b(?:those (?:that|which|of)|what (?:it|they|is|was|has|are|holds|comes))\b",
    # Say connected, received, lost, finished or reconnected.
    "adverb": r"\b(?:is|are|was|were|has|have) (?:here|there|gone|back|away|over)\b(?! (?:a|an|no|some)\b)",
    # Use the plain word: during, other, again, fix, heartbeat.
    "archaic": r"\b(?:anew|beside|mend(?:s|ed|ing)?|lest|whereupon|thereof|hitherto|for good|in vain)\b",
    # Turn it around: the others wait for it.
    "passive": r"\b(?:is|are|was|be|been) (?:waited|looked|asked|cared|held) for\b",
}
_COMPILED = {name: re.compile(text, re.IGNORECASE) for name, text in PATTERNS.items()}


def paragraphs(source: str) -> Iterator[str]:
    """Yield the docstrings, longer strings and comments of Python source, one paragraph at a time."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _split(node.value)
    comment = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment += token.string.lstrip("#") + "\n"
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            yield from _split(comment)
            comment = ""
    yield from _split(comment)


def _split(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        if joined.count(" ") >= 3:  # at least four words
            yield joined


def flags(text: str) -> list[str]:
    """Return the matches in a paragraph, as `pattern: match`."""
    return [f"{name}: {match[0]}" for name, pattern in _COMPILED.items() for match in pattern.finditer(text)]


def flags_per_1000_words(folder: Path) -> float:
    """Count the matches in a folder's modules, generated ones excluded."""
    words = found = 0
    for path in sorted(folder.rglob("*.py")):
        if "pb" not in path.parts:
            for text in paragraphs(path.read_text()):
                words += text.count(" ") + 1
                found += len(flags(text))
    return 1000 * found / max(1, words)
