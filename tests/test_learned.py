"book/learned.py: what it keeps of a forward pass is what that pass computed, and its changes change what they name."
import sys

import common
import numpy as np
import pytest

import k3lib

sys.path.insert(0, str(common.ROOT / "book"))
import learned

TEXT = "Mia has the white cup. Tom has the blue box. Mia gave the cup to Tom. Who has the cup?"


@pytest.fixture(scope="module")
def reader():
    return learned.Reader()


@pytest.fixture(scope="module")
def reading(reader):
    return reader.read(TEXT)


def test_reading_along_changes_no_bit(reader, reading):
    with k3lib.load(learned.FOLDER / "model", ram="1GB", context=64) as model:
        common.same("logits", reading.logits, model.forward(model.tokenizer.encode(TEXT)))


def test_each_layer_has_its_own(reader, reading):
    config = reader.config
    assert list(reading.kda) == sorted(config.kda_layers) and list(reading.mla) == sorted(config.mla_layers)
    assert list(reading.experts) == list(reading.unsteered) == list(range(1, config.num_hidden_layers))
    assert len(reading.mixes) == 2 * config.num_hidden_layers  # the first half-layer has nothing to mix


def test_attention_weights_give_what_attend_gives(reader, monkeypatch):
    given = []
    attend = learned.mla.attend

    def noted(kv_b, q, cache, position, v_dim, threads):
        out = attend(kv_b, q, cache, position, v_dim, threads)
        given.append((cache[:len(q)].copy(), out.copy()))  # the layer gates `out` in place
        return out

    monkeypatch.setattr(learned.mla, "attend", noted)
    c, reading = reader.config, reader.read(TEXT)
    for (L, weights), (rows, out) in zip(reading.mla.items(), given):
        name = learned.tensor_name(L, "mla", "kv_b_proj")
        up = learned.bf16_to_float32(reader.weights[name]).reshape(len(weights), -1, c.kv_lora_rank)
        value = np.einsum("hvl,pl->hpv", up[:, c.qk_nope_head_dim:], rows[:, :c.kv_lora_rank])
        common.close(f"layer {L}", np.einsum("htp,hpv->thv", weights, value).reshape(out.shape), out)


def test_without_a_change_the_next_word_is_the_models(reader, reading):
    sequence = reader.after(TEXT[:-17])
    words = reader.next_word(sequence, TEXT[-17:])
    assert reader.next_word(sequence, TEXT[-17:]) == words  # the sequence was not advanced
    best = reader.tokenizer.token(int(reading.logits[-1].argmax())).decode()
    assert max(words, key=words.get) == best and 0 < sum(words.values()) <= 1 + 1e-5


def test_what_is_lost_changes_the_logits(reader):
    ids = reader.tokenizer.encode(TEXT)
    whole = reader.memory.logits(ids, 18)
    nothing = {L: np.zeros((4, 32), bool) for L in reader.config.kda_layers}
    common.same("nothing lost", learned.Forgetful(reader.memory, nothing).logits(ids, 18), whole)
    everything = {L: ~channels for L, channels in nothing.items()}
    assert np.abs(learned.Forgetful(reader.memory, everything).logits(ids, 18) - whole).max() > 1


def test_every_word_of_a_held_out_story_is_of_one_kind(reader):
    for text in learned.held_out_texts(5, 5):
        for token in reader.tokenizer.encode(text):
            assert learned.kind_of(reader.tokenizer.token(token).decode()) in learned.WORDS


def test_a_gift_changes_the_answer():
    for case in learned.gifts(3, 5):
        assert case.old != case.new and case.sentence.endswith(f"{case.new}.") and case.old in case.sentence
