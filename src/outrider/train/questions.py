"""What the users of a harvest say: prompts as they are, tasks on longer texts, follow-ups, and what the target writes.

A target that is given the beginning of a user's message goes on with it. So it makes texts and questions of kinds that
a file of prompts lacks, in all the lengths that it knows, and says what it thinks of each token on the way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import NamedTuple

from outrider.engine.prompt_file import Conversation

FOLLOW_UPS = (
    "Summarize that in two sentences.",
    "Translate that into German.",
    "List the main points of your answer.",
    "Write that again in simpler words.",
    "Repeat your answer word for word.",
    "Quote the most important part of your answer, and say why it matters.",
)
"""What the user may say next: training prompts rarely ask for text that stands in their context, and users do."""
READINGS = (
    "Summarize the following text.\n\n{text}",
    "Answer the question with the help of the text.\n\nText:\n{text}\n\nQuestion: {question}",
    "Translate the following text into German.\n\n{text}",
    "Correct the mistakes in this text and change nothing else.\n\n{text}",
    "List all names and numbers in this text.\n\n{text}",
    "Rewrite this text so that it is easier to read.\n\n{text}",
)
"""What is asked of a text that is put together from prompts, the last of which is the question."""
READING_PROMPTS = (2, 10)
"""Fewest and most prompts that make such a text."""


class Written(NamedTuple):
    """A message that the target writes: how it begins, and what the user adds to it."""

    opening: str
    closing: str = ""


TRANSLATIONS = (
    Written("Translate this German sentence into English:"),
    Written("What does this German text mean in English?\n\n"),
    Written("Translate from German:"),
    Written("Translate into German:"),
    Written("Please translate this French text into English:"),
    Written("", "\n\nTranslate that into English."),
    Written("Der", "\n\nSay this in English."),
    Written("Die", "\n\nTranslate the German text above."),
    Written("In dem", "\n\nTranslate this into English, please."),
)
SUMMARIES = (
    Written("Summarize this article:"),
    Written("Give me a short summary of this news story.\n\n"),
    Written("(CNN)", "\n\nSummarize the news above."),
    Written("What are the main points of the following article?\n\n"),
    Written("Write a summary of this text in three sentences:"),
    Written("A", "\n\nSummarize this text."),
)
QUESTIONS = (
    *map(Written, ("Who", "What", "When", "Where", "Which", "How", "Why", "Is", "who", "what", "when", "where", "how")),
    *map(Written, ("What is the", "Who was", "When did", "How many", "Where is", "In what year", "Who wrote")),
    *map(Written, ("who played", "what is the name of the", "when was the", "how long does it take")),
)
PASSAGES = (
    Written("The", "\nWhat is this text about?"),
    Written("In", "\nWhen did this happen?"),
    Written('"', "\nWho is mentioned in the text?"),
    Written("Text: The", "\nQuestion: what is the most important fact in the text?"),
    Written("According to", "\nIs this true, and why?"),
    Written("Use the text to answer the question at its end.\n\n"),
    Written("I will give you a passage and ask a question about it.\n\nPassage:"),
)
REQUESTS = (
    Written(""),
    *map(Written, ("Write", "Explain", "Describe", "Imagine", "Compare", "List", "Give", "Create", "Can you", "I")),
    *map(Written, ("How can I", "Pretend", "Solve", "Suppose", "Rewrite", "Extract", "Edit", "Help me", "A")),
)
WRITTEN_KINDS = (TRANSLATIONS, SUMMARIES, QUESTIONS, PASSAGES, REQUESTS)
"""Taken equally often."""


class Questions:
    """What the user says in each conversation, a function of the seed and the conversation's number.

    follow_ups   share of the conversations that have a second turn, where the first ended by itself
    readings     share of them that begin with a task on a longer text, put together from several prompts
    written      share of them whose first message the target writes; the others begin with a prompt of `prompts`
    """

    def __init__(
        self, prompts: Seq[Conversation], *, seed: int, follow_ups: float, readings: float, written: float
    ) -> None:
        self._prompts, self._seed = list(prompts), seed
        random.Random(seed).shuffle(self._prompts)
        self._follow_ups, self._readings, self._written = follow_ups, readings, written

    def first(self, conversation: int) -> str | Written:
        """The first message, or how the target begins it."""
        chance = random.Random(f"{self._seed} first {conversation}")
        own, kind = self._prompts[conversation % len(self._prompts)].turns[0], chance.random()
        if kind < self._written:
            return chance.choice(chance.choice(WRITTEN_KINDS))
        if kind < self._written + self._readings:
            others = [chance.choice(self._prompts).turns[0] for _ in range(chance.randint(*READING_PROMPTS) - 1)]
            return chance.choice(READINGS).format(text="\n\n".join([*others, own]), question=own)
        return own

    def follow_up(self, conversation: int) -> str | None:
        """The second message of those that have one."""
        chance = random.Random(f"{self._seed} second {conversation}")
        return chance.choice(FOLLOW_UPS) if chance.random() < self._follow_ups else None
