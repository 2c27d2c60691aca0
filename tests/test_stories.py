"The small trained model (fixtures/stories/README.md): its world, its logits against JAX's, and what it answers."
import importlib.util
import random
import sys

import numpy as np
import pytest
from common import FIXTURES, same, within
from safetensors.numpy import load_file

import k3lib
from k3lib.plan import PlanError

FOLDER = FIXTURES / "stories"
SIZES = ("SHORT", "MIDDLE", "LONG", "WIDE")
LOGITS = 3e-4  # of logits up to 25; 4e-5 was measured: float32 in two orders of summation, on nine layers


def imported(name):
    "A module of the fixture's folder, which is no package."
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


world = imported("world")
listen = imported("listen")


@pytest.fixture(scope="module")
def model():
    with k3lib.load(FOLDER / "model", ram="1GB", context=256) as model:
        yield model


def words(text):
    return text.replace(".", " ").replace("?", " ").split()


@pytest.mark.parametrize("size", SIZES)
def test_no_training_story_holds_a_held_out_pair(size):
    seeded = random.Random(size)
    for _ in range(300):
        story = world.make_story(seeded, getattr(world, size), held_out=False)
        pairs = [*story.colour.items(), *((person, thing) for thing, person in story.holder.items()),
                 *story.place.items()]
        for sentence in story.sentences:  # also what held only for a while
            said = words(sentence)
            pairs += [(a, b) for a, b in ((said[0], said[-1]), (said[-1], said[-3]))
                      if a in world.NAMES and b in world.THINGS + world.PLACES]
        assert not [pair for pair in pairs if world.is_held_out(*pair)], story.text


def test_the_same_seed_tells_the_same_stories():
    assert world.held_out_examples(3, 5) == world.held_out_examples(3, 5)
    assert world.held_out_examples(3, 5) != world.held_out_examples(4, 5)


def test_answers_by_hand():
    story = world.Story()
    for thing, person, colour in (("ball", "Mia", "red"), ("box", "Tom", "blue")):
        story.holder[thing], story.colour[thing] = person, colour
        story.say(f"{person} has the {colour} {thing}.", thing)
    story.place |= {"Tom": "garden"}
    story.say("Tom is in the garden.", "Tom")
    story.holder["ball"] = "Tom"
    story.say("Mia gave the ball to Tom.", "ball")
    answers = {(q.kind, q.text): q.answer for q in world.questions(story)}
    assert answers == {
        ("recency", "Who has the ball?"): "Tom.",
        ("two-fact", "Who has the red thing?"): "Tom.",
        ("recall", "What colour is the ball?"): "It is red.",
        ("two-fact", "Where is the ball?"): "In the garden.",
        ("recall", "Who has the box?"): "Tom.",
        ("recall", "Who has the blue thing?"): "Tom.",
        ("recall", "Where is Tom?"): "In the garden.",
        ("recall", "What colour is the box?"): "It is blue.",
        ("two-fact", "Where is the box?"): "In the garden.",
        ("counting", "How many things does Tom have?"): "Two.",
    }


def test_held_out_answers_rest_on_a_held_out_pair_and_can_be_read_from_the_story():
    for example in world.held_out_examples(0, 25):
        asked, = example.asked
        assert asked.held_out
        assert asked.kind == "counting" or asked.word in words(example.story)


def test_every_word_of_the_world_is_one_token(model):
    encode = model.tokenizer.encode
    for word in (*world.NAMES, *world.COUNTS):
        assert len(encode(word)) == len(encode(f" {word}")) == 1, word
    for word in (*world.THINGS, *world.COLOURS, *world.PLACES):
        assert len(encode(f" {word}")) == 1, word


def test_logits_are_those_of_the_training_framework(model):
    expected = load_file(FOLDER / "expected.safetensors")
    ids, starts, spoken = expected["ids"], expected["starts"], expected["spoken"]
    hidden = expected["hidden"]
    for i, (begin, end) in enumerate(zip(starts[:-1], starts[1:])):
        model.reset()
        seen = {}
        logits = model.forward(ids[begin:end].tolist(), watch=lambda name, L, value: seen.setdefault(
            (name, L), []).append(np.array(value) if name == "hidden" else value))
        within(f"story {i}, spoken ids", logits[:, spoken], expected["logits"][begin:end], LOGITS)
        total = np.log(np.exp(logits.astype(np.float64)).sum(-1))
        within(f"story {i}, log of the sum over all ids", total, expected["logsumexp"][begin:end], LOGITS)
        if end <= hidden.shape[1]:  # world.SHOWN
            within(f"story {i}, all ids", logits, expected["logits_full"], LOGITS)
            for L in range(len(hidden)):
                layer = np.concatenate(seen["hidden", L])
                within(f"story {i}, layer {L}", layer, hidden[L, begin:end], 4e-4 * np.abs(hidden[L]).max())


def least_budget():
    "The smallest budget that load accepts now."
    with pytest.raises(PlanError) as refused:
        k3lib.load(FOLDER / "model", ram=1, context=64)
    return refused.value.least


@pytest.mark.parametrize("threads, chunk", [(1, 7), (2, 1)])
def test_the_same_bytes_at_the_smallest_budget_with_any_threads_and_chunks(model, threads, chunk):
    example = world.SHOWN
    ids = model.tokenizer.encode(example.text)
    model.reset()
    expected = model.forward(ids)
    with k3lib.load(FOLDER / "model", ram=least_budget() + 1_000_000, threads=threads, context=64) as small:
        assert small.plan.pinned_bytes < small.plan.trunk_bytes, "nothing is streamed"
        rows = [small.forward(ids[at:at + chunk]) for at in range(0, len(ids), chunk)]
    same(f"{threads} threads, {chunk} tokens at a time", np.concatenate(rows), expected)


# Of 12 held-out questions of each kind: 12, 11, 12 and 12 were right. README.md of the fixture has the shares of 200.
RIGHT = {"recency": 11, "recall": 10, "two-fact": 11, "counting": 11}


def test_held_out_questions_are_answered(model):
    share = listen.accuracy(listen.listen(model, example) for example in world.held_out_examples(1, 12))
    assert all(share[kind] >= right / 12 for kind, right in RIGHT.items()), share


def test_what_make_decode_shows_is_right(model):
    assert listen.listen(model, world.SHOWN).right
