"""C7: a JSON schema holds inside a block of draft tokens as it does token by token."""

from __future__ import annotations

import json

import pytest

from outrider import SamplingParams, Speculation
from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.errors import RequestError
from tests.naive import naive_tokens
from tests.tiny import EOS, random_table, tiny_llm

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["x", "yes", "yet"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
NO_SPACES = dict.fromkeys(b" \t\r\n", -30.0)  # a Markov model would go on with spaces for ever
GUESS = b'{"n":7,"kind":"yes"} and more'


class GuessDrafter:
    """Drafts a likely document from where the answer stands; often wrong, and illegal after the document's end."""

    name = "guess"
    laws = frozenset({DraftLaw.POINT})
    trees = False
    wants = ()

    def open(self, seq): ...
    def commit(self, seq, committed): ...
    def close(self, seq): ...

    def propose(self, seqs, budgets, rng):
        return Draft(
            [
                SeqDraft.chain(GUESS[seq.output_len : seq.output_len + k], source=self.name)
                for seq, k in zip(seqs, budgets, strict=True)
            ]
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_c7_always_valid_and_equal_to_plain(temperature, seed):
    llm = tiny_llm(random_table(257, order=1, seed=seed, sharpness=1.5), GuessDrafter(), k=8, rule="coupled")
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=300, json_schema=SCHEMA, logit_bias=NO_SPACES
    )
    found = []
    for method, k in (("none", 0), ("guess", 1), ("guess", 3), ("guess", 8)):
        [result] = llm.generate("x", params, speculation=Speculation(method=method, k=k))
        assert result.completions[0].finish_reason == "stop"
        document = json.loads(result.text)
        assert set(document) == {"n", "kind"}
        assert 0 <= document["n"] <= 99
        assert document["kind"] in ("x", "yes", "yet")
        assert k < 3 or result.stats.accepted > 0, "what the schema forces is accepted"
        found.append(result.token_ids)
    assert all(tokens == found[0] for tokens in found)
    assert found[0][-1] == EOS
    llm.engine.check_integrity()


def test_the_schema_changes_what_is_generated():
    model = random_table(257, order=1, seed=0, sharpness=1.5)
    free = naive_tokens(model, [ord("x")], SamplingParams(max_tokens=20))
    [result] = tiny_llm(model).generate("x", SamplingParams(max_tokens=300, json_schema=json.dumps(SCHEMA)))
    assert result.token_ids[: len(free)] != free


@pytest.mark.parametrize("schema", ["{not json", '{"type": "no such type"}', "[1]"])
def test_a_schema_that_cannot_be_used_is_refused_in_one_line(schema):
    llm = tiny_llm(random_table(257))
    with pytest.raises(RequestError, match="json_schema") as caught:
        llm.generate("x", SamplingParams(json_schema=schema))
    assert "\n" not in str(caught.value)
    llm.engine.check_integrity()
