"""The schematics of the book, drawn from a Config.

    import schematics
    schematics.architecture(config)             the last line of a cell shows the picture with its alternative text
    schematics.where(config, "kda")             the small picture at the top of a chapter, with one box lit
    figure, alt = schematics.kda(config)        the matplotlib figure and the text that says what it shows

Every number in a picture comes from the config, from k3lib, or from the paths of the chapters.

One visual language. A box is arithmetic or memory, an arrow is data that moves, a dashed frame is repeated. Text stands
only on light ground: in a box, or on a tag of its own. Lines have a middle tone. So a picture reads on white paper and
on a dark page, and its own background is transparent. Colour helps, but a label always says the same. Lengths are in
tenths of an inch; x grows to the right and y grows downward.
"""

import base64
import dataclasses
import io
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path as Line
from matplotlib.text import Text

from k3lib.config import Config
from k3lib.disk import PAGE, READ_UNIT
from k3lib.header import ITEMSIZE
from k3lib.layout import READ_AHEAD
from k3lib.memory import shown_size
from k3lib.mxfp4 import E2M1, GROUP, SCALE
from k3lib.plan import Plan, position_bytes, state_bytes
from k3lib.tensors import TABLE, global_tensors, layer_parts, layer_tensors, sizes

WIDTH = 48  # of every picture: 461 pixels of a web page, so that a phone shrinks the letters by a quarter at most
INK, LINE, TAG = "#1b2430", "#7a828a", "#eef0f2"  # text; arrows and frames; the ground of a tag
COLORS = {  # kind of a box: (ground, edge). The edges have a contrast above 3 on white and on #111
    "kda": ("#d6e6f5", "#4a86c5"),
    "mla": ("#e6dcf1", "#8e6bb8"),
    "ffn": ("#d8eddf", "#3f9461"),
    "mix": ("#f6eac8", "#b5851d"),
    "memory": ("#dfe3e7", "#7a828a"),
    "plain": ("#f7f8f9", "#7a828a"),
    "lit": ("#f6a873", "#d1602f"),
}
BIG, SMALL = 10, 9  # points: first line of a box; all other text
STYLE = {"svg.hashsalt": "k3", "svg.fonttype": "path", "font.family": "DejaVu Sans"}


# What the pictures are made of


@dataclasses.dataclass(frozen=True)
class Box:
    "A rectangle on the canvas. `at` gives a point of its edge."

    x: float
    y: float
    w: float
    h: float

    def at(self, side: str, part: float = 0.5) -> tuple[float, float]:
        "The point at `part` (0..1) of the edge `side`: left, right, top or bottom."
        across, down = self.x + part * self.w, self.y + part * self.h
        return {
            "left": (self.x, down),
            "right": (self.x + self.w, down),
            "top": (across, self.y),
            "bottom": (across, self.y + self.h),
        }[side]


def line_height(points: float) -> float:
    "Tenths of an inch from one line of text to the next."
    return 1.25 * points / 7.2


class Canvas:
    """A figure to draw on, WIDTH wide and `height` high.

    `texts`: pairs of a Text and the Box that must hold it, None for a tag. `arrows`: the points of each arrow. Tests
    use both: text fits, nothing overlaps, arrows end at boxes.
    """

    def __init__(self, height: float):
        self.figure = Figure(figsize=(WIDTH / 10, height / 10))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        self.boxes: list[Box] = []
        self.texts: list[tuple[Text, Box | None]] = []
        self.arrows: list[list[tuple[float, float]]] = []

    def write(self, x: float, y: float, text: str, box: Box | None, size: float = SMALL, **options) -> Text:
        "Text with its centre, or the point that `ha` and `va` say, at (x, y)."
        options = {"ha": "center", "va": "center_baseline", "color": INK} | options
        written = self.axes.text(x, y, text, fontsize=size, zorder=4, **options)
        self.texts.append((written, box))
        return written

    def patch(self, box: Box, ground: str, edge: str, width: float = 1.0, corner: float = 0.4, dashed: bool = False):
        "A rectangle with round corners."
        self.axes.add_patch(
            FancyBboxPatch(
                (box.x, box.y),
                box.w,
                box.h,
                boxstyle=f"round,pad=0,rounding_size={corner}",
                facecolor=ground,
                edgecolor=edge,
                linewidth=width,
                linestyle=(0, (4, 2)) if dashed else "solid",
                zorder=1 if dashed else 2,
            )
        )

    def box(self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "plain", right: str = "",
            bold: bool = True) -> Box:
        """A box. The first line of `text` is larger and bold, unless `bold` is False.

        With `right`, `text` stands at the left and `right` at the right.
        """
        box = Box(x, y, w, h)
        self.boxes.append(box)
        self.patch(box, *COLORS[kind], width=2.0 if kind == "lit" else 1.0)
        first, _, rest = text.partition("\n")
        size, weight = (BIG, "bold") if bold else (SMALL, "normal")
        heights = [line_height(size)] + [line_height(SMALL)] * (rest.count("\n") + 1 if rest else 0)
        top = y + (h - sum(heights)) / 2
        across, ha = (x + 0.8, "left") if right else (x + w / 2, "center")
        if first:
            self.write(across, top + heights[0] / 2, first, box, size, weight=weight, ha=ha)
        for i, line in enumerate(rest.split("\n") if rest else ()):
            self.write(across, top + sum(heights[: i + 1]) + heights[i + 1] / 2, line, box, ha=ha)
        lines = right.split("\n") if right else ()
        for i, line in enumerate(lines):
            middle = y + h / 2 + (i - (len(lines) - 1) / 2) * line_height(SMALL)
            self.write(x + w - 0.8, middle, line, box, ha="right")
        return box

    def tag(self, x: float, y: float, text: str, **options) -> Text:
        "Text outside of all boxes, on light ground of its own."
        ground = dict(boxstyle="round,pad=0.25,rounding_size=0.3", facecolor=TAG, edgecolor="none")
        return self.write(x, y, text, None, bbox=ground, **options)

    def frame(self, x: float, y: float, w: float, h: float) -> Box:
        "A dashed frame: what is in it is repeated, or belongs together."
        box = Box(x, y, w, h)
        self.patch(box, "none", LINE, dashed=True, corner=0.8)
        return box

    def line(self, *points: tuple[float, float], head: bool = True, color: str = LINE, width: float = 1.4) -> None:
        "A line through `points`, with an arrow head at the last one."
        self.arrows.append(list(points))
        self.axes.add_patch(
            FancyArrowPatch(
                path=Line(points),
                arrowstyle="-|>" if head else "-",
                mutation_scale=9,
                color=color,
                linewidth=width,
                joinstyle="miter",
                capstyle="butt",
                zorder=3,
            )
        )

    def down(self, above: Box, below: Box, x: float | None = None) -> None:
        "An arrow straight down from one box to another, at `x` or in the middle of the narrower one."
        if x is None:
            narrow = above if above.w <= below.w else below
            x = narrow.x + narrow.w / 2
        self.line((x, above.y + above.h), (x, below.y))

    def plus(self, x: float, y: float, sign: str = "+") -> Box:
        "A round sign: what arrives is added, or multiplied."
        box = self.box(x - 0.9, y - 0.9, 1.8, 1.8)
        self.write(x, y, sign, box, BIG, weight="bold")
        return box


@dataclasses.dataclass(frozen=True, repr=False)
class Schematic:
    """A picture and what it shows in words. Unpacks to (figure, alt).

    As the last value of a cell it shows itself as an HTML image with alternative text. An `image/png` output would
    lose that text in JupyterLab and in myst-nb, which drop the metadata that nbconvert understands; an HTML image keeps
    it in all three. The image is an SVG with its letters as shapes: it is sharp in print and needs no font.
    """

    canvas: Canvas
    alt: str

    @property
    def figure(self) -> Figure:
        "The matplotlib figure."
        return self.canvas.figure

    def __iter__(self):
        return iter((self.figure, self.alt))

    def __repr__(self) -> str:
        return self.alt

    def svg(self) -> bytes:
        "The picture as SVG: the same bytes for the same picture."
        file = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return file.getvalue()

    def _repr_mimebundle_(self, **_) -> dict[str, str]:
        data, width = base64.b64encode(self.svg()).decode(), round(self.figure.get_figwidth() * 96)
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(self.alt)}" width="{width}">'
        return {"text/html": image, "text/plain": self.alt}


# Numbers


def chapter(stem: str) -> str:
    "The number of the chapter whose file is named NN_`stem`.py, as 2.1; '' if there is none."
    for path in Path(__file__).parent.glob(f"[0-9]*/[0-9]*_{stem}.py"):
        if re.fullmatch(rf"\d+_{stem}", path.stem):
            return ".".join(str(int(re.match(r"\d+", part)[0])) for part in path.parts[-2:])
    return ""


def part_bytes(config: Config, part: str) -> int:
    "Bytes in the file of one layer's tensors of a part, a key of k3lib.tensors.TABLE; of one expert for 'expert'."
    size = sizes(config)
    return sum(math.prod(size[symbol] for symbol in row.shape) * ITEMSIZE[row.dtype] for row in TABLE[part])


def count(n: float) -> str:
    "A number with commas."
    return f"{n:,.0f}"


def raised(power: float) -> str:
    "e to a whole power, written with superscripts."
    return "e" + f"{power:g}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def layers_of(config: Config, part: str) -> int:
    "How many layers have the part: 'kda', 'mla', 'dense' or 'moe'."
    return sum(part in layer_parts(config, L) for L in range(config.num_hidden_layers))


def sources_of(config: Config) -> int:
    "How many sources the last mix has: the finished blocks, the embedding among them, and the running sum."
    return -(-config.num_hidden_layers // config.attn_res_block_size) + 1


# K3 as a whole


def architecture(config: Config) -> Schematic:
    "K3 from a token's id to its logits, with shapes, bytes in the checkpoint and the chapter of each box."
    c, mix, norm, moe = config, chapter("residual"), chapter("functions"), chapter("moe")
    n, nbytes = {p: layers_of(c, p) for p in TABLE}, {p: shown_size(part_bytes(c, p)) for p in TABLE}
    H, head = count(c.hidden_size), shown_size(c.vocab_size * c.hidden_size * ITEMSIZE["BF16"])
    expert_layer = shown_size(part_bytes(c, "moe") + c.num_experts * part_bytes(c, "expert"))
    d = Canvas(93)
    stream, x, w = 2.2, 6.5, 40  # the residual stream's line; left edge and width of the boxes
    ids = d.box(x, 0.5, w, 3, f"a token's id, 0 to {count(c.vocab_size - 1)}", right=f"chapter {chapter('tokenizer')}")
    embed = d.box(x, 5.5, w, 4.8, f"embedding\n{count(c.vocab_size)} × {H}; a token reads one row", "memory",
                  f"{chapter('model')}\n{head}")
    d.down(ids, embed)

    frame = d.frame(x - 1, 12.5, w + 2, 61)
    d.tag(x + w / 2, 14.6, f"{c.num_hidden_layers} layers, one after the other")
    mixed = f"mix, then RMSNorm\nup to {sources_of(c)} vectors of {H}, one out"
    mixes = [d.box(x, y, w, 4.8, mixed, "mix", f"{mix}, {norm}\n{nbytes['ffn_norms']} a layer") for y in (17.2, 44.4)]
    attention = d.box(x, 24, w, 15.6)
    d.box(x + 0.8, 24.8, w - 1.6, 6.6, f"KDA in {n['kda']} layers\n{c.kda_num_heads} heads; each keeps "
          f"{c.kda_head_dim} × {c.kda_head_dim}\nnumbers, however long the text", "kda",
          f"{chapter('kda')}\n{nbytes['kda']} a layer")
    d.box(x + 0.8, 32.2, w - 1.6, 6.6, f"MLA in {n['mla']} layers\n{c.num_attention_heads} heads; together they keep\n"
          f"{c.kv_lora_rank + c.qk_rope_head_dim} numbers for each token", "mla",
          f"{chapter('mla')}\n{nbytes['mla']} a layer")
    forward = d.box(x, 51.2, w, 18)
    dense = f"dense MLP in {n['dense']} layer{'s' * (n['dense'] != 1)}\nwidth {count(c.intermediate_size)}"
    d.box(x + 0.8, 52, w - 1.6, 4.8, dense, "ffn", f"{moe}\n{nbytes['dense']} a layer")
    d.box(x + 0.8, 57.6, w - 1.6, 10.8, f"experts in {n['moe']} layers\na router chooses {c.num_experts_per_token} of "
          f"{c.num_experts},\n{nbytes['expert']} each; they work on\n{count(c.routed_expert_hidden_size)} numbers, and "
          f"{c.num_shared_experts} shared\nexperts on all {H}", "ffn",
          f"{chapter('router')}, {moe}\n{expert_layer} a layer")
    d.down(mixes[0], attention)
    d.down(mixes[1], forward)

    last_mix = d.box(x, 75.4, w, 3, "last mix", "mix", mix)
    last_norm = d.box(x, 80, w, 3, "last RMSNorm", "mix", norm)
    out = d.box(x, 84.6, w, 4.8, f"head\n{count(c.vocab_size)} × {H}; every row is read", "memory",
                f"{chapter('model')}\n{head}")
    d.down(last_mix, last_norm)
    d.down(last_norm, out)
    logits = (x + w / 2, 91.4)
    d.line(out.at("bottom"), (logits[0], 90.6))
    d.tag(*logits, f"{count(c.vocab_size)} logits, one for each id")

    sums = [d.plus(stream, y) for y in (41.9, 71.5)]
    d.line(embed.at("left"), (stream, embed.at("left")[1]), sums[0].at("top"))
    d.line(sums[0].at("bottom"), sums[1].at("top"))
    d.line(sums[1].at("bottom"), (stream, last_mix.at("left")[1]), last_mix.at("left"))
    for box in mixes:
        y = box.at("left")[1]
        d.line((stream, y), box.at("left"))
    for box, total in zip((attention, forward), sums):
        d.line(box.at("bottom"), (x + w / 2, total.y + 0.9), total.at("right"))
    for y in (30, 58):
        d.tag(stream, y, "residual stream", rotation=90)
    return Schematic(
        d,
        f"K3 from a token's id to its logits. The embedding, {count(c.vocab_size)} rows of {H} numbers, {head}, gives "
        f"one vector, which begins the residual stream. {c.num_hidden_layers} layers follow. In each layer a mix of up "
        f"to {sources_of(c)} vectors of the stream and an RMSNorm feed the attention: KDA in {n['kda']} layers, "
        f"{nbytes['kda']} each, or MLA in {n['mla']} layers, {nbytes['mla']} each. Its result is added to the stream. "
        f"A second mix and RMSNorm feed a dense MLP in {n['dense']} layer, {nbytes['dense']}, or experts in {n['moe']} "
        f"layers, {expert_layer} each, of which a router chooses {c.num_experts_per_token} of {c.num_experts}. That "
        f"result is added too. A last mix, a last RMSNorm and the head, {head}, give {count(c.vocab_size)} logits.",
    )


MODEL = {  # boxes of the small picture: {name: (left edge, top, width, height, text, kind)}
    "embedding": (0.5, 4.5, 6.6, 4.4, "embed-\nding", "memory"),
    "mix": (9, 4.5, 4, 4.4, "mix", "mix"),
    "kda": (14.8, 2.3, 5.4, 3.6, "KDA", "kda"),
    "mla": (14.8, 7.5, 5.4, 3.6, "MLA", "mla"),
    "router": (27.6, 2.3, 6.8, 3.6, "router", "ffn"),
    "experts": (27.6, 7.5, 6.8, 3.6, "experts", "ffn"),
    "head": (42.5, 4.5, 5, 4.4, "head", "memory"),
    "text": (0.5, 14, 6.6, 4.4, "text,\nids", "plain"),
    "plan": (9, 14, 7.1, 4.4, "memory\nplan", "plain"),
    "files": (18, 14, 6, 4.4, "files,\nnames", "plain"),
    "disk": (25.9, 14, 5, 4.4, "disk", "plain"),
    "readers": (32.8, 14, 6.2, 4.4, "reader\npool", "plain"),
    "kernels": (40.9, 14, 6.6, 4.4, "kernels", "plain"),
}
OTHER_MIXES = ((22, 4.5, 4, 4.4), (36.8, 4.5, 4, 4.4))  # before the router and before the head


def where(config: Config, *lit: str) -> Schematic:
    """The small picture at the top of a chapter, with the boxes `lit` marked: names of MODEL, as "kda".

    The upper row is the model, the lower one what brings weights to it. Raises ValueError for an unknown box.
    """
    if unknown := sorted(set(lit) - set(MODEL)):
        raise ValueError(f"where: no box is called {', '.join(unknown)}; there are {', '.join(MODEL)}")
    d, made = Canvas(18.8), {}
    for name, (*place, text, kind) in [*MODEL.items(), *(("mix", (*other, "mix", "mix")) for other in OTHER_MIXES)]:
        box = d.box(*place, kind="lit" if name in lit else kind)
        lines = text.split("\n")
        for i, line in enumerate(lines):
            y = box.y + box.h / 2 + (i - (len(lines) - 1) / 2) * line_height(SMALL)
            d.write(box.x + box.w / 2, y, line, box, weight="bold" if name in lit else "normal")
        made.setdefault(name, box)
    second, third = (Box(*place) for place in OTHER_MIXES)
    d.frame(8, 1.2, 27.8, 10.8)
    d.tag(12, 1.2, f"{config.num_hidden_layers} layers")
    for one, next_one in (("embedding", "mix"), ("files", "disk"), ("disk", "readers"), ("readers", "kernels")):
        d.line(made[one].at("right"), made[next_one].at("left"))
    for fork, ways, join in ((made["mix"], ("kda", "mla"), second), (second, ("router",), None)):
        for way in ways:
            d.line(fork.at("right"), (fork.x + fork.w + 0.9, 6.7), (fork.x + fork.w + 0.9, made[way].at("left")[1]),
                   made[way].at("left"))
        for way in ways if join else ():
            d.line(made[way].at("right"), (join.x - 0.9, made[way].at("right")[1]), (join.x - 0.9, 6.7), join.at("left"))
    d.line(made["router"].at("bottom"), made["experts"].at("top"))
    d.line(made["experts"].at("right"), (35.1, 9.3), (35.1, 6.7), third.at("left"))
    d.line(third.at("right"), made["head"].at("left"))
    d.line(made["text"].at("top"), made["embedding"].at("bottom"))
    d.line(made["kernels"].at("top"), (44.2, 13), (22, 13), (22, 12))
    names = {name: place[4].replace("-\n", "").replace("\n", " ") for name, place in MODEL.items()}
    marked = ", ".join(names[name] for name in MODEL if name in lit) or "none"
    return Schematic(
        d,
        f"Where this chapter is. Marked: {marked}. The model: embedding, then {config.num_hidden_layers} layers of mix, "
        "KDA or MLA, mix, router and experts, then a last mix and the head. Below, what serves it: text and ids, the "
        "memory plan, and the weights' way from files through disk, reader pool and kernels.",
    )


# The parts


def kda(config: Config) -> Schematic:
    "The data flow of one KDA layer for one token: what is made from x, and what happens to a head's state."
    c, number = config, chapter("kda")
    heads, d_k, P = c.kda_num_heads, c.kda_head_dim, c.kda_num_heads * c.kda_head_dim
    d = Canvas(72)
    top = d.box(0.5, 0.5, 47, 3, f"x: {count(c.hidden_size)} numbers, mixed and normed")
    w, gap = 7.2, 0.76
    columns = [0.5 + i * (w + gap) for i in range(6)]
    per_head = f"{heads} × {d_k}"
    names = ("q_proj", "k_proj", "v_proj", "f_a, f_b", "b_proj", "g_proj")
    made = [per_head, per_head, per_head, per_head, f"{heads}", per_head]
    rows = [d.box(left, 6.2, w, 4.8, f"{name}\n{shape}", "kda") for left, name, shape in zip(columns, names, made)]
    for box in rows:
        d.down(top, box)
    conv = d.box(columns[0], 13.4, 3 * w + 2 * gap, 4.8, f"convolution, then SiLU\neach channel: its last "
                 f"{c.kda_conv_kernel} inputs")
    decay = d.box(columns[3], 13.4, w, 9.8, f"decay\n{raised(c.kda_gate_lower_bound)} to 1\na channel")
    beta = d.box(columns[4], 13.4, w, 9.8, "sigmoid\n0 to 1\na head")
    gate = d.box(columns[5], 13.4, w, 9.8, "sigmoid\n0 to 1\na number")
    for box, below in zip(rows, (conv, conv, conv, decay, beta, gate)):
        d.down(box, below, box.x + w / 2)
    norm = d.box(columns[0], 20.4, 2 * w + gap, 2.8, "length 1")
    for left in columns[:2]:
        d.down(conv, norm, left + w / 2)
    state = d.box(columns[0], 27.6, 5 * w + 4 * gap, 24, kind="memory")
    for left, above, name in zip(columns, (norm, norm, conv, decay, beta), "qkvαβ"):
        d.line((left + w / 2, above.y + above.h), (left + w / 2, state.y))
        d.tag(left + w / 2, 25.2, name)
    lines = ("S fades: each key channel by its own α", "recall: r = Sᵀk, what S holds under k",
             "error: v − r, what is new in v", "write: S gains β k (v − r)ᵀ", "read: o = Sᵀq / √" + f"{d_k}")
    d.write(state.x + state.w / 2, 29.4, f"state S of a head, {d_k} × {d_k} numbers", state, BIG, weight="bold")
    steps = [d.box(state.x + 1, 31 + i * 4, state.w - 2, 3, f"{i + 1}. {text}", bold=False) for i, text in enumerate(lines)]
    for one, next_one in zip(steps, steps[1:]):
        d.down(one, next_one)
    normed = d.box(columns[0], 54, 5 * w + 4 * gap, 3, f"RMSNorm of each head's {d_k} numbers")
    d.down(state, normed)
    times = d.plus(columns[2] + w / 2, 60.2, "×")
    d.line(normed.at("bottom"), times.at("top"))
    d.line(gate.at("bottom"), (gate.x + w / 2, 60.2), times.at("right"))
    out = d.box(columns[0], 63.2, 47, 4.8, f"o_proj\n{count(P)} numbers in, {count(c.hidden_size)} out", "kda")
    d.line(times.at("bottom"), (times.x + 0.9, out.y))
    d.line(out.at("bottom"), (24, 69.6))
    d.tag(24, 70.5, "added to the residual stream")
    return Schematic(
        d,
        f"Data flow of a KDA layer for one token. From x, {count(c.hidden_size)} numbers, six products are made: q, k "
        f"and v of {heads} heads times {d_k}, the input of the decay, one number a head for beta, and the gate. q, k "
        f"and v pass a convolution over the last {c.kda_conv_kernel} inputs of each channel and SiLU; q and k are then "
        f"scaled to length 1. The decay alpha lies between e to the power {c.kda_gate_lower_bound:g} and 1 for each key "
        f"channel. Each head has a state S of {d_k} times {d_k} numbers, and five steps: S fades by alpha; r is what S "
        f"holds under k; v minus r is the error; S gains beta times k times the error; o is read under q. o is normed "
        f"for each head, multiplied by the gate, and brought back to {count(c.hidden_size)} numbers by o_proj.",
    )


def mla(config: Config) -> Schematic:
    "MLA before and after absorption, side by side: what is kept of a token, and where the matrices stand."
    c, heads = config, config.num_attention_heads
    nope, extra, rank, value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank, c.v_head_dim
    before, after = heads * (nope + value) + extra, rank + extra
    d = Canvas(69)
    w, query = 19.4, f"a query of each head\n{heads} × ({nope} + {extra})"
    columns = {
        "before": [(5, f"of each token\nc: {rank}, r: {extra}"), (12, f"$W_{{uk}}$ and $W_{{uv}}$\nfrom {rank} to {heads} × {nope + value}"),
                   (19, f"kept: keys, values, r\n{count(before)} numbers"), (27, query), (None, ""),
                   (41, f"scores\nkeys of {nope + extra}"), (48, f"weighted sum\nof values of {value}"), (None, ""),
                   (62, f"output\n{heads} × {value}")],
        "after": [(5, f"of each token\nc: {rank}, r: {extra}"), (None, ""), (19, f"kept: c, r\n{count(after)} numbers"),
                  (27, query), (34, f"$W_{{uk}}$, transposed\nfrom {nope} to {rank}"), (41, f"scores\nrows of {rank + extra}"),
                  (48, f"weighted sum\nof c, {rank}"), (55, f"$W_{{uv}}$\nfrom {rank} to {value}"), (62, f"output\n{heads} × {value}")],
    }
    for x, (name, rows) in zip((3.6, 27.8), columns.items()):
        d.tag(x + w / 2, 2.2, f"{name} absorption", weight="bold", size=BIG)
        kinds = ("plain", "mla", "memory", "plain", "mla", "plain", "plain", "mla", "plain")
        made = [None if y is None else d.box(x, y, w, 4.8, text, kind) for (y, text), kind in zip(rows, kinds)]
        token = [box for box in made[:3] if box]
        flow = [box for box in made[3:] if box]
        for part in (token, flow):
            for one, next_one in zip(part, part[1:]):
                d.down(one, next_one)
        cache, scores, total = made[2], made[5], made[6]
        for box in (scores, total):
            d.line(cache.at("left"), (x - 2, cache.at("left")[1]), (x - 2, box.at("left")[1]), box.at("left"))
    return Schematic(
        d,
        f"MLA before and after absorption, side by side. Before: c, {rank} numbers of each token, becomes keys and "
        f"values of {heads} heads; {count(before)} numbers are kept for a token. A head's query of {nope} plus {extra} "
        f"numbers is scored against keys of {nope + extra}, and values of {value} are summed. After: only c and r are "
        f"kept, {count(after)} numbers. The transposed W_uk brings the query from {nope} to {rank} numbers, scores are "
        f"products with rows of {rank + extra}, c itself is summed, and W_uv brings the sum from {rank} to {value}. "
        f"Both give the same output of {heads} times {value} numbers.",
    )


def residual(config: Config) -> Schematic:
    "Block residuals over depth: which vectors exist at which layer, what one mix reads, and the wiring of a layer."
    layers, block = config.num_hidden_layers, config.attn_res_block_size
    starts = list(range(0, layers, block))
    read = min(layers - 1, starts[len(starts) // 2] - block // 3)  # the layer whose first mix is drawn
    blocks = sum(start < read for start in starts)  # finished at that layer, the embedding among them
    left, right, top, step, bar = 15.5, 47.5, 4.6, 3.3, 2.2
    d = Canvas(top + step * (len(starts) + 1) + 29)

    def at(layer):
        return left + (right - left) * layer / layers

    def row(i):
        return top + i * step

    for start in starts:
        d.tag(at(start) + 0.2, 2, str(start))
    d.tag(6.8, 2, "from layer")
    d.box(1, row(0), 11.6, bar, "embedding", "memory", bold=False)
    rows = [d.box(at(0), row(0), right - left, bar, kind="memory")]
    for i, start in enumerate(starts, 1):
        end = min(start + block, layers)
        d.box(1, row(i), 11.6, bar, f"layers {start} to {end - 1}", "mix", bold=False)
        rows.append(d.box(at(start), row(i), at(end) - at(start), bar, kind="mix"))
        if end < layers:
            d.box(at(end), row(i), right - at(end), bar, kind="memory")
    bottom = row(len(starts) + 1)
    x = at(read)
    mixed = d.box(x - 9, bottom + 1.6, 18, 4.8, f"first mix of layer {read}\nreads {blocks + 1} vectors", "lit")
    d.line((x, row(0)), (x, mixed.y), color=COLORS["lit"][1])
    for i in range(blocks + 1):
        d.axes.plot([x], [row(i) + bar / 2], "o", ms=5, color=COLORS["lit"][1], zorder=4)
    d.box(1, bottom + 1.6, 3, 1.8, kind="mix")
    d.tag(4.6, bottom + 2.5, "grows", ha="left")
    d.box(1, bottom + 4.4, 3, 1.8, kind="memory")
    d.tag(4.6, bottom + 5.3, "finished", ha="left")

    y = bottom + 10.4
    d.tag(24, y, "inside each layer", weight="bold", size=BIG)
    stream = d.box(1, y + 12.6, 46, 4.8, "residual stream\nfinished vectors, and one running sum that grows", "memory")
    w, gap = 10, 2
    names = (("mix", "mix"), ("attention\nafter RMSNorm", "kda"), ("mix", "mix"), ("feed-forward\nafter RMSNorm", "ffn"))
    chain = [d.box(1 + i * (w + gap), y + 3, w, 4.8, text, kind) for i, (text, kind) in enumerate(names)]
    for mix, half in (chain[:2], chain[2:]):
        d.line((mix.x + w / 2, stream.y), mix.at("bottom"))
        d.line(mix.at("right"), half.at("left"))
        plus = d.plus(half.x + w / 2, y + 10.1)
        d.line(half.at("bottom"), plus.at("top"))
        d.line(plus.at("bottom"), (half.x + w / 2, stream.y))
    return Schematic(d, "")
