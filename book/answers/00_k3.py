# %% [markdown]
# # Answers: part 0, K3 on one page
#
# Try the exercises of [chapter 0.1](../00_k3/01_k3.ipynb) before you read on. · [contents](../README.md)

# %%
import contextlib
import io
from pathlib import Path

import jupytext

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())


def run_chapter(path, *changes):
    "What the chapter's code defines before it writes, after each (old, new) of `changes` was replaced in it."
    names = {}
    for cell in jupytext.read(ROOT / "book" / path).cells:
        if cell.cell_type == "code":
            if "while len(ids)" in cell.source:
                return names
            source = cell.source
            for old, new in changes:
                source = source.replace(old, new)
            with contextlib.redirect_stdout(io.StringIO()):
                exec(source, names)
    raise ValueError(f"{path} writes nothing")


def report(names):
    answer = names["answer"]
    predicted = names["logits"][len(names["prompt"]) - 1:][:len(answer)].argmax(1)  # each row predicts the next id
    right = int((predicted == answer).sum())
    print(f"largest difference of a logit {names['difference']:.1f}; {right} of {len(answer)} ids are right")


# %% [markdown]
# ## 1. A block that is never finished
#
# The running sum then goes on through all layers, and each mix sees it alone. The assertion that fails is the one on
# the logits, on `difference`. Without it one can count the ids.

# %%
never = ("            blocks, p = [*blocks, p], 0", "            pass  #")
unchecked = ("assert difference", "difference")
names = run_chapter("00_k3/01_k3.py", never, unchecked)
report(names)
assert names["difference"] > 1

# %% [markdown]
# ## 2. A memory that adds

# %%
names = run_chapter("00_k3/01_k3.py", ("v[t] - recalled", "v[t]"), unchecked)
report(names)
assert names["difference"] > .1

# %% [markdown]
# The logits move by far more than the chapter's tolerance, although the text is short: keys overlap, and the sum
# returns what overlaps.
#
# ## 3. Half of the trunk in memory

# %%
token = names["schematics"].token_bytes(names["k3"])
nbytes = sum(token.values()) - token["trunk"] / 2
print(f"{nbytes / 1e9:.1f} GB a token, {nbytes / 3e9:.1f} s at 3 GB/s")
assert 27 < nbytes / 3e9 < 28
