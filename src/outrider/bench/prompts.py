"""The prompts that are measured when no file is given."""

from __future__ import annotations

from collections.abc import Collection

from outrider.engine.prompt_file import Conversation, of_categories, require_positive


def builtin_prompts(limit: int | None = None, categories: Collection[str] = ()) -> list[Conversation]:
    """Six short prompts of different kinds, or those of some of these kinds. Half of them ask for text that repeats
    itself or the prompt. Raises ConfigError for a kind that there is not."""
    require_positive("limit", limit)
    prompts = [Conversation(f"builtin-{category}", category, (text,)) for category, text in BUILTIN.items()]
    return of_categories(prompts, categories, "the built-in prompts")[:limit]


BUILTIN = {
    "prose": "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "code": "Write a Python function that checks whether a string is a palindrome, with a docstring and examples.",
    "repetition": "Write the numbers from one to thirty in words, one on each line.",
    "edit": (
        "Copy this function and rename the variable `x` to `value` everywhere. Change nothing else.\n\n"
        "def clamp(x, low, high):\n"
        "    if x < low:\n        return low\n"
        "    if x > high:\n        return high\n"
        "    return x\n"
    ),
    "extraction": (
        "List every city named in this text, one on each line: We flew from Lisbon to Vienna, took the train to "
        "Prague, and came home by way of Vienna, Zurich and Lyon."
    ),
    "question": "Why does the sky look blue at noon and red at sunset? Answer in three sentences.",
}
