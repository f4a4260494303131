"""The target answers prompts through the engine, batched, and what its layers say on the way is kept.

The hidden states come by the same way as at serving: a drafter that drafts nothing is told of them when tokens become
final. What a conversation gives depends on the settings and its number alone, so a harvest can stop and go on.

Shapes: T positions, F features, A tokens to learn, C likeliest tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from outrider.control.cost_cache import identity_of_files
from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.json_file import JsonObject
from outrider.core.protocols import Committed
from outrider.core.rng import Rng, fold_seed
from outrider.core.types import SamplingParams, Sequence, TargetIdentity
from outrider.drafters.head_fit import require_host
from outrider.drafters.options import require_int, require_number
from outrider.engine.llm import LLM, Message
from outrider.engine.prompt_file import Conversation
from outrider.engine.request import Request, Result, Speculation
from outrider.errors import ConfigError, ModelFileError
from outrider.models.load import LoadedModel
from outrider.train.questions import Questions, Written
from outrider.train.ranges import MOST_SEED, require_within
from outrider.train.shards import HARVEST, Harvested, Shard, read_shards, write_manifest, write_shard, write_whole

OLDER_LACK = ("hidden_size", "weights")
"""Keys of harvest.json that the first harvests were made without."""
LEFT_OUT = "left-out.json"
"""Names the conversations that gave nothing."""
SHARD_SEQUENCES = 64
HEAD_ROWS = 256
"""Positions whose logits over the whole vocabulary are made at a time."""
WRITING_TEMPERATURE = 0.8
"""At which the target writes what a user says: at 1 a small target soon talks nonsense."""
USER_TEXT = "what the user says"
"""Stands for it where a template is cut."""

OnAnswer = Callable[[int], None]
"""Told of every conversation that ended: the tokens of its answers."""


@dataclass(frozen=True, slots=True)
class HarvestSettings:
    """How the answers come about.

    conversations   how many; they take the prompts in a shuffled order, again and again
    max_tokens      of an answer, and of a user's message that the target writes
    longest_prompt  prompts of more tokens are left out
    temperatures    taken in turn
    follow_ups, readings, written   see `Questions`
    likeliest       tokens kept of each distribution
    """

    conversations: int
    layers: tuple[int, ...]
    max_tokens: int = 192
    longest_prompt: int = 1024
    temperatures: tuple[float, ...] = (0.0, 0.0, 1.0)
    follow_ups: float = 0.2
    readings: float = 0.1
    written: float = 0.5
    likeliest: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("conversations", 1), ("max_tokens", 1), ("longest_prompt", 1), ("likeliest", 1)):
            require_int("train", name, getattr(self, name), low)
        require_within("seed", self.seed, 0, MOST_SEED)
        for name in ("follow_ups", "readings", "written"):
            require_number("train", name, getattr(self, name), 0, 1)
        for temperature in self.temperatures:
            require_number("train", "temperatures", temperature, 0, 100)
        if self.readings + self.written > 1:
            raise ConfigError(
                f"train: readings = {self.readings} and written = {self.written} are not allowed together: they are "
                "shares of the conversations, so give two that make 1 or less"
            )

    def bytes_per_token(self, hidden_size: int) -> int:
        """On disk."""
        return 4 + 2 * hidden_size * len(self.layers) + 6 * self.likeliest


class FeatureKeeper:
    """Drafts nothing and keeps what it is told: the hidden states of the layers `wants`."""

    name = "feature_keeper"
    laws = frozenset({DraftLaw.POINT})
    trees = False

    def __init__(self, wants: tuple[int, ...]) -> None:
        self.wants = wants
        self._finished: dict[tuple[int, ...], list[Tensor]] = {}
        self._features: dict[int, list[Tensor]] = {}

    def open(self, seq: Sequence) -> None:
        self._features[seq.id] = []

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        return Draft([SeqDraft.empty(self.name) for _ in seqs])

    def commit(self, seq: Sequence, committed: Committed) -> None:
        if committed.features_TF is not None:
            self._features[seq.id].append(committed.features_TF.bfloat16())

    def close(self, seq: Sequence) -> None:
        """A sequence that came to an end is kept under its tokens, which say all that its features depend on."""
        features = self._features.pop(seq.id)
        if seq.finished:
            self._finished.setdefault(tuple(seq.tokens), []).append(torch.cat(features))

    def take(self, tokens: Seq[int]) -> Tensor:
        """[T, F] of a sequence that came to an end; it is forgotten. Several may have ended with the same tokens."""
        same = self._finished.pop(key := tuple(tokens))
        if same[1:]:
            self._finished[key] = same[1:]
        return same[0]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A question that is being answered, and what the conversation has given so far; or, with `writes`, a message that
    the target writes in the user's place.

    What is learned of it begins with the token `learn_from`: those before it are the template's, or an earlier turn's.
    """

    conversation: int
    messages: list[Message]
    prompt_ids: list[int]
    learn_from: int
    harvested: list[Harvested]
    writes: Written | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)


class Harvester:
    """Fills `folder` with answers of a target, which must be natively loaded and have a chat template."""

    def __init__(
        self,
        opened: LoadedModel,
        identity: TargetIdentity,
        prompts: Seq[Conversation],
        settings: HarvestSettings,
        folder: Path,
    ) -> None:
        self._host = require_host("train", opened.model)
        assert settings.layers[-1] == self._host.n_layers - 1, "the last layer says what the target's p is"
        self._opened, self._settings, self._folder = opened, settings, folder
        shares = {name: getattr(settings, name) for name in ("follow_ups", "readings", "written")}
        self._questions = Questions(prompts, seed=settings.seed, **shares)
        write_manifest(folder, HARVEST, manifest_of(opened, identity, prompts, settings), OLDER_LACK)
        shards = read_shards(folder)
        self._next_shard = len(shards)
        self._left_out = _left_out(folder)
        self.left = unanswered(folder, shards, settings.conversations)

    def run(self, batch: int, on_answer: OnAnswer) -> None:
        """Answers what is left, `batch` conversations at a time; a shard is written as soon as there is one."""
        keeper = FeatureKeeper(self._settings.layers)
        opened = self._opened
        llm = LLM.from_parts(
            opened.model,
            {keeper.name: keeper},
            tokenizer=opened.tokenizer,
            template=opened.template,
            max_batch=batch,
        )
        head = self._host.head_rows(range(opened.model.vocab_size))
        waiting = self._first_turns(llm, on_answer)
        running: dict[int, _Turn] = {}
        kept: list[Harvested] = []
        while True:
            while len(running) < batch and (first := next(waiting, None)) is not None:
                running[llm.engine.add(self._request(first))] = first
            if not running:
                break
            _, results = llm.engine.step()
            for request_id, result in results.items():
                turn = running.pop(request_id)
                if (following := self._next_turn(llm, turn, result, keeper, head)) is not None:
                    running[llm.engine.add(self._request(following))] = following
                    continue
                if not turn.harvested:
                    self._left_out.append(turn.conversation)
                kept += turn.harvested
                on_answer(sum(len(h.tokens) - h.prompt_len for h in turn.harvested))
            if len(kept) >= SHARD_SEQUENCES:
                self._write(kept)
                kept = []
        self._write(kept)

    def _write(self, kept: list[Harvested]) -> None:
        """What was kept, and which conversations gave nothing."""
        if kept:
            write_shard(self._folder, self._next_shard, kept)
            self._next_shard += 1
        if self._left_out:
            told = json.dumps({"conversations": self._left_out}) + "\n"
            write_whole(self._folder / LEFT_OUT, lambda path: path.write_text(told, "utf-8"))

    def _first_turns(self, llm: LLM, on_answer: OnAnswer) -> Iterator[_Turn]:
        before = self._before_user_text(llm)
        for conversation in self.left:
            said = self._questions.first(conversation)
            if isinstance(said, Written):
                ids = llm.encode_text(before + said.opening)
                turn = _Turn(conversation, [], ids, len(ids), [], said)
            else:
                turn = self._turn(llm, conversation, [{"role": "user", "content": said}], llm.encode_text(before), [])
            if turn.prompt_len <= self._settings.longest_prompt:
                yield turn
            else:
                self._left_out.append(conversation)
                on_answer(0)

    def _before_user_text(self, llm: LLM) -> str:
        """What the template puts before the first thing that a user says."""
        template = self._opened.template
        text = template.render([{"role": "user", "content": USER_TEXT}], add_generation_prompt=False)
        if USER_TEXT not in text:
            raise ConfigError(f"the chat template of {self._opened.path} changes what users say: nothing to harvest")
        return text[: text.index(USER_TEXT)]

    def _next_turn(
        self, llm: LLM, turn: _Turn, result: Result, keeper: FeatureKeeper, head: Callable[[Tensor], Tensor]
    ) -> _Turn | None:
        """Keeps what was answered; the turn behind it: the answer to what the target wrote, or the second question of
        some of the conversations whose first answer ended by itself."""
        if turn.writes is not None:
            keeper.take([*result.prompt_ids, *result.token_ids])
            asked = turn.writes.opening + result.text + turn.writes.closing
            said, known = [], turn.prompt_ids
        else:
            turn.harvested.append(found := self._harvested(turn, result, keeper, head))
            ended = result.completions[0].finish_reason == "stop"
            again = self._questions.follow_up(turn.conversation)
            if again is None or not ended or turn.harvested[1:]:
                return None
            asked, known = again, found.tokens
            said = [*turn.messages, {"role": "assistant", "content": result.text}]
        following = self._turn(
            llm, turn.conversation, [*said, {"role": "user", "content": asked}], known, turn.harvested
        )
        return following if following.prompt_len <= self._settings.longest_prompt else None

    def _turn(
        self, llm: LLM, conversation: int, messages: list[Message], known: Seq[int], harvested: list[Harvested]
    ) -> _Turn:
        """The question at the end of `messages`. Of its tokens, the first that are those of `known` are not learned."""
        ids = llm.encode_prompt(messages)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, known, strict=False)))
        return _Turn(conversation, messages, ids, max(1, same), harvested)

    def _request(self, turn: _Turn) -> Request:
        settings = self._settings
        params = SamplingParams(
            temperature=WRITING_TEMPERATURE
            if turn.writes
            else settings.temperatures[turn.conversation % len(settings.temperatures)],
            max_tokens=settings.max_tokens,
            seed=fold_seed(settings.seed, 4 * turn.conversation + (3 if turn.writes else len(turn.harvested))),
        )
        return Request(turn.prompt_ids, params, Speculation(method=FeatureKeeper.name, k=0))

    def _harvested(
        self, turn: _Turn, result: Result, keeper: FeatureKeeper, head: Callable[[Tensor], Tensor]
    ) -> Harvested:
        if not result.token_ids:
            raise ModelFileError(f"{self._opened.path} cannot answer: {result.completions[0].finish_reason}")
        tokens = [*result.prompt_ids, *result.token_ids]
        features_TF = keeper.take(tokens)
        width = self._host.hidden_size
        ids, logps = [], []
        for chunk_Td in torch.split(features_TF[turn.learn_from - 1 :, -width:], HEAD_ROWS):
            logits_TV = head(self._host.last_norm(chunk_Td.float().contiguous()))
            top = logits_TV.topk(self._settings.likeliest)
            ids.append(top.indices.int())
            logps.append((top.values - logits_TV.logsumexp(-1, keepdim=True)).half())
        unknown_1F = features_TF.new_zeros((1, features_TF.shape[1]))
        return Harvested(
            turn.conversation,
            len(turn.harvested),
            turn.prompt_len,
            turn.learn_from,
            tokens,
            torch.cat([features_TF, unknown_1F]),
            torch.cat(ids),
            torch.cat(logps),
        )


def manifest_of(
    opened: LoadedModel, identity: TargetIdentity, prompts: Seq[Conversation], settings: HarvestSettings
) -> dict[str, object]:
    """What harvest.json says of a harvest. The number of conversations is not in it: it may grow."""
    return {
        "target": identity.names[0],
        "vocabulary_sha256": identity.vocabulary_sha256,
        "hidden_size": require_host("train", opened.model).hidden_size,
        "weights": _identity_of_weights(opened.path),
        "prompts_sha256": hashlib.sha256("\n".join(repr(p.turns) for p in prompts).encode()).hexdigest(),
        "n_prompts": len(prompts),
        **{name: value for name, value in asdict(settings).items() if name != "conversations"},
    }


def unanswered(folder: Path, shards: Seq[Shard], conversations: int) -> list[int]:
    """Those of so many conversations that a harvest still lacks; `shards` are the folder's."""
    done = {conversation for shard in shards for conversation in shard.conversations}.union(_left_out(folder))
    return [c for c in range(conversations) if c not in done]


def _identity_of_weights(path: Path) -> str:
    """A short hash of the files that hold them, whatever else lies in the model's folder."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return hashlib.sha256("".join(map(identity_of_files, files)).encode()).hexdigest()[:20]


def _left_out(folder: Path) -> list[int]:
    """Conversations that gave nothing, as an earlier run found: their prompts were too long, or the target wrote none.
    Raises ModelFileError for a damaged file."""
    path = folder / LEFT_OUT
    found = JsonObject.read(path, optional=True).values.get("conversations", [])
    if not isinstance(found, list) or not all(type(conversation) is int for conversation in found):
        raise ModelFileError(f"{path} names no conversations. Delete it: they are then tried again")
    return found
