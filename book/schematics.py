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
from html import escape
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path as Line
from matplotlib.text import Text

from k3lib.config import Config
from k3lib.disk import PAGE, READ_UNIT
from k3lib.header import ITEMSIZE
from k3lib.layout import READ_AHEAD
from k3lib.memory import shown_size
from k3lib.mla import CACHE_TILE, TOKENS_AT_ONCE
from k3lib.mxfp4 import E2M1, GROUP, SCALE
from k3lib.plan import Plan
from k3lib.tensors import TABLE, Tensor, global_tensors, layer_parts, layer_tensors, sizes

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
FONT = "DejaVu Sans"  # matplotlib brings it
STYLE = {"svg.hashsalt": "k3", "svg.fonttype": "path", "mathtext.fontset": "dejavusans"}


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
        self.figure = Figure(figsize=(WIDTH / 10, height / 10), dpi=100, layout="none")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        self.boxes: list[Box] = []
        self.frames: list[Box] = []
        self.texts: list[tuple[Text, Box | None]] = []
        self.arrows: list[list[tuple[float, float]]] = []

    def write(self, x: float, y: float, text: str, box: Box | None, size: float = SMALL, **options) -> Text:
        "Text with its centre, or the point that `ha` and `va` say, at (x, y)."
        options = {"ha": "center", "va": "center_baseline", "color": INK, "family": FONT} | options
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

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        kind: str = "plain",
        right: str = "",
        bold: bool = True,
    ) -> Box:
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
        self.frames.append(Box(x, y, w, h))
        self.patch(self.frames[-1], "none", LINE, dashed=True, corner=0.8)
        return self.frames[-1]

    def arrow(self, *points: tuple[float, float], color: str = LINE) -> None:
        "A line through `points`, with an arrow head at the last one."
        self.arrows.append(list(points))
        self.axes.add_patch(
            FancyArrowPatch(
                path=Line(points),
                arrowstyle="-|>",
                mutation_scale=9,
                color=color,
                linewidth=1.4,
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
        self.arrow((x, above.y + above.h), (x, below.y))

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
        "The picture as SVG: the same bytes for the same picture, whatever style a chapter has set for its plots."
        file = io.BytesIO()
        with style.context(["default", STYLE]):
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


def raised(base: str, power: str) -> str:
    "base to the power, in superscripts."
    return base + power.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


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
    embed = d.box(
        x,
        5.5,
        w,
        4.8,
        f"embedding\n{count(c.vocab_size)} × {H}; a token reads one row",
        "memory",
        f"{chapter('model')}\n{head}",
    )
    d.down(ids, embed)

    d.frame(x - 1, 12.5, w + 2, 61)
    d.tag(x + w / 2, 14.6, f"{c.num_hidden_layers} layers, one after the other")
    mixed = f"mix, then RMSNorm\nup to {sources_of(c)} vectors of {H}, one out"
    mixes = [d.box(x, y, w, 4.8, mixed, "mix", f"{mix}, {norm}\n{nbytes['ffn_norms']} a layer") for y in (17.2, 44.4)]
    attention = d.box(x, 24, w, 15.6)
    d.box(
        x + 0.8,
        24.8,
        w - 1.6,
        6.6,
        f"KDA in {n['kda']} layers\n{c.kda_num_heads} heads; each keeps "
        f"{c.kda_head_dim} × {c.kda_head_dim}\nnumbers, however long the text",
        "kda",
        f"{chapter('kda')}\n{nbytes['kda']} a layer",
    )
    d.box(
        x + 0.8,
        32.2,
        w - 1.6,
        6.6,
        f"MLA in {n['mla']} layers\n{c.num_attention_heads} heads; together they keep\n"
        f"{c.kv_lora_rank + c.qk_rope_head_dim} numbers for each token",
        "mla",
        f"{chapter('mla')}\n{nbytes['mla']} a layer",
    )
    forward = d.box(x, 51.2, w, 18)
    dense = f"dense MLP in {n['dense']} layer{'s' * (n['dense'] != 1)}\nwidth {count(c.intermediate_size)}"
    d.box(x + 0.8, 52, w - 1.6, 4.8, dense, "ffn", f"{moe}\n{nbytes['dense']} a layer")
    d.box(
        x + 0.8,
        57.6,
        w - 1.6,
        10.8,
        f"experts in {n['moe']} layers\na router chooses {c.num_experts_per_token} of "
        f"{c.num_experts},\n{nbytes['expert']} each; they work on\n{count(c.routed_expert_hidden_size)} numbers, and "
        f"{c.num_shared_experts} shared\nexperts on all {H}",
        "ffn",
        f"{chapter('router')}, {moe}\n{expert_layer} a layer",
    )
    d.down(mixes[0], attention)
    d.down(mixes[1], forward)

    last_mix = d.box(x, 75.4, w, 3, "last mix", "mix", mix)
    last_norm = d.box(x, 80, w, 3, "last RMSNorm", "mix", norm)
    out = d.box(
        x,
        84.6,
        w,
        4.8,
        f"head\n{count(c.vocab_size)} × {H}; every row is read",
        "memory",
        f"{chapter('model')}\n{head}",
    )
    d.down(last_mix, last_norm)
    d.down(last_norm, out)
    logits = (x + w / 2, 91.4)
    d.arrow(out.at("bottom"), (logits[0], 90.6))
    d.tag(*logits, f"{count(c.vocab_size)} logits, one for each id")

    sums = [d.plus(stream, y) for y in (41.9, 71.5)]
    d.arrow(embed.at("left"), (stream, embed.at("left")[1]), sums[0].at("top"))
    d.arrow(sums[0].at("bottom"), sums[1].at("top"))
    d.arrow(sums[1].at("bottom"), (stream, last_mix.at("left")[1]), last_mix.at("left"))
    for box in mixes:
        y = box.at("left")[1]
        d.arrow((stream, y), box.at("left"))
    for box, total in zip((attention, forward), sums):
        d.arrow(box.at("bottom"), (x + w / 2, total.y + 0.9), total.at("right"))
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
    d.tag(11.3, 1.2, f"{config.num_hidden_layers} layers")
    for one, next_one in (("embedding", "mix"), ("files", "disk"), ("disk", "readers"), ("readers", "kernels")):
        d.arrow(made[one].at("right"), made[next_one].at("left"))
    for fork, ways, join in ((made["mix"], ("kda", "mla"), second), (second, ("router",), None)):
        for way in ways:
            d.arrow(
                fork.at("right"),
                (fork.x + fork.w + 0.9, 6.7),
                (fork.x + fork.w + 0.9, made[way].at("left")[1]),
                made[way].at("left"),
            )
        for way in ways if join else ():
            d.arrow(
                made[way].at("right"), (join.x - 0.9, made[way].at("right")[1]), (join.x - 0.9, 6.7), join.at("left")
            )
    d.arrow(made["router"].at("bottom"), made["experts"].at("top"))
    d.arrow(made["experts"].at("right"), (35.1, 9.3), (35.1, 6.7), third.at("left"))
    d.arrow(third.at("right"), made["head"].at("left"))
    d.arrow(made["text"].at("top"), made["embedding"].at("bottom"))
    d.arrow(made["kernels"].at("top"), (44.2, 13), (22, 13), (22, 12))
    names = {name: place[4].replace("-\n", "").replace("\n", " ") for name, place in MODEL.items()}
    marked = ", ".join(names[name] for name in MODEL if name in lit) or "none"
    return Schematic(
        d,
        f"Where this chapter is. Marked: {marked}. The model: embedding, then {config.num_hidden_layers} layers of "
        "mix, KDA or MLA, mix, router and experts, then a last mix and the head. Below, what serves it: text and ids, "
        "the memory plan, and the weights' way from files through disk, reader pool and kernels.",
    )


# The parts


def kda(config: Config) -> Schematic:
    "The data flow of one KDA layer for one token: what is made from x, and what happens to a head's state."
    c = config
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
    conv = d.box(
        columns[0],
        13.4,
        3 * w + 2 * gap,
        4.8,
        f"convolution, then SiLU\neach channel: its last {c.kda_conv_kernel} inputs",
    )
    decay = d.box(columns[3], 13.4, w, 9.8, f"decay\n{raised('e', f'{c.kda_gate_lower_bound:g}')} to 1\na channel")
    beta = d.box(columns[4], 13.4, w, 9.8, "sigmoid\n0 to 1\na head")
    gate = d.box(columns[5], 13.4, w, 9.8, "sigmoid\n0 to 1\na number")
    for box, below in zip(rows, (conv, conv, conv, decay, beta, gate)):
        d.down(box, below, box.x + w / 2)
    norm = d.box(columns[0], 20.4, 2 * w + gap, 2.8, "length 1")
    for left in columns[:2]:
        d.down(conv, norm, left + w / 2)
    state = d.box(columns[0], 27.6, 5 * w + 4 * gap, 24, kind="memory")
    for left, above, name in zip(columns, (norm, norm, conv, decay, beta), "qkvαβ"):
        d.arrow((left + w / 2, above.y + above.h), (left + w / 2, state.y))
        d.tag(left + w / 2, 25.2, name)
    lines = (
        "S fades: each key channel by its own α",
        r"recall: $\hat{v} = S^T k$, what S holds under k",
        r"error: $v - \hat{v}$, what is new in v",
        r"write: S gains $β\, k\, (v - \hat{v})^T$",
        "read: o = Sᵀq / √" + f"{d_k}",
    )
    d.write(state.x + state.w / 2, 29.4, f"state S of a head, {d_k} × {d_k} numbers", state, BIG, weight="bold")
    steps = [
        d.box(state.x + 1, 31 + i * 4, state.w - 2, 3, f"{i + 1}. {text}", bold=False) for i, text in enumerate(lines)
    ]
    for one, next_one in zip(steps, steps[1:]):
        d.down(one, next_one)
    normed = d.box(columns[0], 54, 5 * w + 4 * gap, 3, f"RMSNorm of each head's {d_k} numbers")
    d.down(state, normed)
    times = d.plus(columns[2] + w / 2, 60.2, "×")
    d.arrow(normed.at("bottom"), times.at("top"))
    d.arrow(gate.at("bottom"), (gate.x + w / 2, 60.2), times.at("right"))
    out = d.box(columns[0], 63.2, 47, 4.8, f"o_proj\n{count(P)} numbers in, {count(c.hidden_size)} out", "kda")
    d.arrow(times.at("bottom"), (times.x + 0.9, out.y))
    d.arrow(out.at("bottom"), (24, 69.6))
    d.tag(24, 70.5, "added to the residual stream")
    return Schematic(
        d,
        f"Data flow of a KDA layer for one token. From x, {count(c.hidden_size)} numbers, six products are made: q, k "
        f"and v of {heads} heads times {d_k}, the input of the decay, one number a head for beta, and the gate. q, k "
        f"and v pass a convolution over the last {c.kda_conv_kernel} inputs of each channel and SiLU; q and k are then "
        f"scaled to length 1. The decay alpha lies between e to the power {c.kda_gate_lower_bound:g} and 1 for each "
        f"key channel. Each head has a state S of {d_k} times {d_k} numbers, and five steps: S fades by alpha; it "
        "recalls what it holds under k; v minus that is the error; S gains beta times k times the error; o is read "
        "under q. o is normed for each head, multiplied by the gate, and brought back to "
        f"{count(c.hidden_size)} numbers by o_proj.",
    )


def mla(config: Config) -> Schematic:
    "MLA before and after absorption, side by side: what is kept of a token, and where the matrices stand."
    c, heads = config, config.num_attention_heads
    nope, extra, rank, value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank, c.v_head_dim
    before, after = heads * (nope + value) + extra, rank + extra
    d = Canvas(69)
    w, query = 19.4, f"a query of each head\n{heads} × ({nope} + {extra})"
    columns = {
        "before": [
            (5, f"of each token\nc: {rank}, r: {extra}"),
            (12, f"$W_{{uk}}$ and $W_{{uv}}$\nfrom {rank} to {heads} × {nope + value}"),
            (19, f"kept: keys, values, r\n{count(before)} numbers"),
            (27, query),
            (None, ""),
            (41, f"scores\nkeys of {nope + extra}"),
            (48, f"weighted sum\nof values of {value}"),
            (None, ""),
            (62, f"output\n{heads} × {value}"),
        ],
        "after": [
            (5, f"of each token\nc: {rank}, r: {extra}"),
            (None, ""),
            (19, f"kept: c, r\n{count(after)} numbers"),
            (27, query),
            (34, f"$W_{{uk}}$, transposed\nfrom {nope} to {rank}"),
            (41, f"scores\nrows of {rank + extra}"),
            (48, f"weighted sum\nof c, {rank}"),
            (55, f"$W_{{uv}}$\nfrom {rank} to {value}"),
            (62, f"output\n{heads} × {value}"),
        ],
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
            d.arrow(cache.at("left"), (x - 2, cache.at("left")[1]), (x - 2, box.at("left")[1]), box.at("left"))
    return Schematic(
        d,
        f"MLA before and after absorption, side by side. Before: c, {rank} numbers of each token, becomes keys and "
        f"values of {heads} heads; {count(before)} numbers are kept for a token. A head's query of {nope} plus {extra} "
        f"numbers is scored against keys of {nope + extra}, and values of {value} are summed. After: only c and r are "
        f"kept, {count(after)} numbers. The transposed W_uk brings the query from {nope} to {rank} numbers, scores are "
        f"products with rows of {rank + extra}, c itself is summed, and W_uv brings the sum from {rank} to {value}. "
        f"Both give the same output of {heads} times {value} numbers.",
    )


def item(config: Config) -> Schematic:
    "One item of MLA's kernel: a scratch row for each of its queries, and the three steps that fill and read a row."
    c = config
    nope, extra, rank, value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank, c.v_head_dim
    heads = min(16, c.num_attention_heads)
    d = Canvas(53)
    columns = ((1, 19), (20.4, 16.6), (37.4, 9.6))
    query = d.box(1, 0.5, 19, 4.8, f"a query of one head\n{nope} + {extra} numbers")
    out = d.box(20.4, 0.5, 26.6, 4.8, f"output for that query\n{value} numbers")
    texts = (f"its scratch row: query\n{rank} absorbed, {extra} extra", f"context\n{rank}", "$\\mu$, $Z$\n2")
    row = [d.box(x, 12, w, 4.8, text, "lit") for (x, w), text in zip(columns, texts)]
    for y, name in ((18.2, "row of head 1, token 0"), (21.8, f"row of head {heads - 1}, token {TOKENS_AT_ONCE - 1}")):
        last = [d.box(x, y, w, 3, name if x == 1 else "", "memory", bold=False) for x, w in columns]
    d.down(query, row[0])
    d.tag(10.5, 8.6, "1. start: transposed $W_{uk}$")
    d.arrow((28.7, row[1].y), (28.7, out.y + out.h))
    d.tag(32, 8.6, "3. value: $W_{uv}$, then divide by $Z$")
    scores = d.box(1, 29.6, 19, 6.6, f"2. visit a tile\nscores of 4 rows\nagainst {CACHE_TILE} positions")
    weights = d.box(22, 29.6, 25, 6.6, "weights\n$\\mu$ and $Z$ change; the context\nshrinks and gains weight × c")
    d.down(last[0], scores)
    d.arrow(scores.at("right"), weights.at("left"))
    for part, x in zip(last[1:], (28.7, 42.2)):
        d.arrow((x, weights.y), (x, part.y + part.h))
    rows = f"{CACHE_TILE} rows"
    names = (f"tile 0\n{rows}", f"this tile\n{rows}", f"next tile\n{rows}", f"last tile\nup to {rows}")
    tiles = [d.box(1 + 11.7 * i, 42, 10.9, 4.8, name, "lit" if i == 1 else "memory") for i, name in enumerate(names)]
    for x, box in ((16, scores), (22.8, weights)):
        d.arrow((x, tiles[1].y), (x, box.y + box.h))
    d.tag(24, 50, f"the cache: c and r of each position, {rank + extra} numbers a row")
    return Schematic(
        d,
        f"One item of the kernel: {heads} heads and up to {TOKENS_AT_ONCE} tokens. Each token and head has a scratch "
        f"row of three parts: the query, {rank} absorbed and {extra} extra numbers; the context, {rank} numbers; and "
        f"the maximum mu and the sum Z. Step 1, start: the query of {nope} plus {extra} numbers fills the first part "
        f"through the transposed W_uk. Step 2, visit, once for each tile of {CACHE_TILE} cache rows: four scratch rows "
        "at a time get scores; these become weights, mu and Z change, and the context shrinks and gains weight times "
        f"c. Step 3, value: W_uv makes the output of {value} numbers from the context, which is divided by Z.",
    )


def residual(config: Config) -> Schematic:
    "Block residuals over depth: which vectors exist at which layer, what one mix reads, and the wiring of a layer."
    layers, block = config.num_hidden_layers, config.attn_res_block_size
    starts = list(range(0, layers, block))
    read = min(layers - 1, starts[len(starts) // 2] - block // 3)  # the layer whose first mix is drawn
    blocks = sum(start < read for start in starts)  # finished at that layer, the embedding among them
    left, right, top, step, bar = 15.5, 47, 4.6, 3.3, 2.2
    d = Canvas(top + step * (len(starts) + 1) + 29)

    def at(layer):
        return left + (right - left) * layer / layers

    def row(i):
        return top + i * step

    for start in starts:
        d.tag(at(start) + 0.2, 2, str(start))
    d.tag(6.8, 2, "from layer")
    d.box(1, row(0), 11.6, bar, "embedding", bold=False)
    rows = [d.box(at(0), row(0), right - left, bar, kind="memory")]
    for i, start in enumerate(starts, 1):
        end = min(start + block, layers)
        d.box(1, row(i), 11.6, bar, f"layers {start} to {end - 1}", bold=False)
        rows.append(d.box(at(start), row(i), at(end) - at(start), bar, kind="mix"))
        if end < layers:
            d.box(at(end), row(i), right - at(end), bar, kind="memory")
    bottom = row(len(starts) + 1)
    x = at(read)
    mixed = d.box(x - 9, bottom + 1.6, 18, 4.8, f"first mix of layer {read}\nreads {blocks + 1} vectors", "lit")
    d.arrow((x, row(0)), (x, mixed.y), color=COLORS["lit"][1])
    for i in range(blocks + 1):
        d.axes.plot([x], [row(i) + bar / 2], "o", ms=5, color=COLORS["lit"][1], zorder=4)
    d.box(1, bottom + 1.6, 3, 1.8, kind="mix")
    d.tag(4.6, bottom + 2.5, "grows", ha="left")
    d.box(1, bottom + 4.4, 3, 1.8, kind="memory")
    d.tag(4.6, bottom + 5.3, "finished", ha="left")

    y = bottom + 10.4
    d.tag(24, y, "inside each layer", weight="bold", size=BIG)
    stream = d.box(1, y + 12.6, 46, 4.8, "residual stream\nfinished vectors, and one running sum that grows", "memory")
    names = (
        (1, 8.6, "mix", "mix"),
        (11.4, 12.6, "attention\nafter RMSNorm", "kda"),
        (25.8, 7, "mix", "mix"),
        (34.4, 12.6, "feed-forward\nafter RMSNorm", "ffn"),
    )
    chain = [d.box(x, y + 3, w, 4.8, text, kind) for x, w, text, kind in names]
    for mix, half in (chain[:2], chain[2:]):
        d.arrow((mix.x + mix.w / 2, stream.y), mix.at("bottom"))
        d.arrow(mix.at("right"), half.at("left"))
        plus = d.plus(half.x + half.w / 2, y + 10.1)
        d.arrow(half.at("bottom"), plus.at("top"))
        d.arrow(plus.at("bottom"), (half.x + half.w / 2, stream.y))
    return Schematic(
        d,
        f"Block residuals over {layers} layers. The embedding is there from layer 0 on. Each block of {block} layers "
        f"has a sum that grows while its layers run; after that it is finished and stays readable to the end. The "
        f"blocks begin at layers {', '.join(map(str, starts))}. As an example, the first mix of layer {read} reads "
        f"{blocks + 1} vectors: {blocks} finished ones and the sum that grows. Below, a layer: a mix reads the stream, "
        "attention works on it after an RMSNorm and its result is added; a second mix reads the stream, the "
        "feed-forward part works on it after an RMSNorm and its result is added.",
    )


def mxfp4(block: bytes = bytes.fromhex("2f 71 08 53") * 4, scale: int = 126) -> Schematic:
    "An MXFP4 block to the bit: `block`, the bytes of GROUP weights, and its `scale` byte."
    d, wide = Canvas(63), 5.75
    d.tag(24, 2, f"{len(block)} bytes for {GROUP} weights, and one scale byte", weight="bold", size=BIG)
    made = []
    for j, byte in enumerate(block):
        x, y = 1.7 + (j % 8) * wide, 4.6 + (j // 8) * 7.4
        made.append(d.box(x, y, wide - 0.35, 6.6, kind="lit" if j == 0 else "plain"))
        d.write(x + made[j].w / 2, y + 1.2, f"{byte:02x}", made[j], family="monospace", weight="bold")
        for i, (weight, kind) in enumerate(((2 * j + 1, "kda"), (2 * j, "mla"))):
            half = d.box(x + 0.2 + i * 2.55, y + 2.3, 2.45, 3.9, kind=kind)
            d.write(half.x + half.w / 2, y + 3.4, "w", half)
            d.write(half.x + half.w / 2, y + 5.1, str(weight), half)
    power = f"{raised('2', f'{scale}-127')} = {SCALE[scale]:g}"
    d.box(1.7, 20, 45.65, 3.2, f"scale byte {scale:02x}: every weight times {power}", "memory")

    y = 26
    whole = d.box(1.7, y, 45.65, 13.4, kind="lit")
    d.arrow(made[0].at("left"), (0.8, made[0].at("left")[1]), (0.8, y + 1.5), (1.7, y + 1.5))
    d.write(24.5, y + 1.5, f"byte 0 = {block[0]:02x}, bit by bit", whole, BIG, weight="bold")
    answers, cell_width = [], 5.2
    for i, (code, kind) in enumerate(zip((block[0] >> 4, block[0] & 15), ("kda", "mla"))):
        x = 2.5 + i * 22.2
        half = d.box(x, y + 3, 21.9, 9.6, kind=kind)
        d.write(half.x + half.w / 2, y + 4.4, f"w {1 - i} is the {'high' if i == 0 else 'low'} half: code {code}", half)
        for bit, ground in enumerate(("mix", "ffn", "ffn", "plain")):
            cell = d.box(x + 0.65 + bit * cell_width, y + 6, cell_width - 0.2, 3, kind=ground)
            d.write(cell.x + cell.w / 2, y + 7.5, str(code >> 3 - bit & 1), cell, family="monospace", weight="bold")
        for middle, name in ((0.5, "sign"), (2, "exponent"), (3.42, "mantissa")):
            d.write(x + 0.55 + middle * cell_width, y + 10.7, name, half)
        w = f"{E2M1[code]:g} × {SCALE[scale]:g} = {E2M1[code] * SCALE[scale]:g}".replace("-", "−")
        answers.append(f"w {1 - i} = {w}")
        d.down(half, d.box(x, y + 15.6, 21.9, 3.2, answers[-1]))
    y += 24
    d.tag(24, y - 1, f"the {len(E2M1) // 2} magnitudes of a code, to scale", weight="bold", size=BIG)
    left, unit = 3, 41.5 / E2M1[:8].max()
    d.axes.plot([left - 1.4, left + E2M1[:8].max() * unit + 1.4], [y + 5, y + 5], color=LINE, lw=1.4)
    for value in E2M1[:8]:
        d.axes.plot([left + value * unit] * 2, [y + 4.4, y + 5.6], color=LINE, lw=1.4)
        d.tag(left + value * unit, y + 2.7, f"{value:g}")
    d.tag(24, y + 8.6, f"{len(block)} + 1 bytes for {GROUP} weights: {8 * (len(block) + 1) / GROUP:g} bits a weight")
    return Schematic(
        d,
        f"An MXFP4 block: {len(block)} bytes hold {GROUP} weights of four bits. Byte j holds weight 2j in its low half "
        f"and weight 2j + 1 in its high half. One scale byte, here {scale}, multiplies every weight by "
        f"{SCALE[scale]:g}. A four-bit code is one sign bit, two exponent bits and one mantissa bit. Byte 0 is "
        f"{block[0]:02x}: {answers[1]}, {answers[0]}. The magnitudes are {', '.join(f'{v:g}' for v in E2M1[:8])}. With "
        f"the scale byte a weight takes {8 * (len(block) + 1) / GROUP:g} bits.",
    )


def squares(total: int, chosen: int) -> np.ndarray:
    "An RGBA image of `total` small squares, `chosen` of them, at random places, in the colours of a lit box."
    columns, pixels = math.ceil(math.sqrt(total * 8 / 7)), 8
    rows = -(-total // columns)
    lit = np.zeros(rows * columns, int)
    lit[np.random.default_rng(7).choice(total, chosen, replace=False)] = 1
    lit[total:] = 2
    colors = np.array([to_rgba(COLORS["ffn"][0]), to_rgba(COLORS["lit"][1]), (0, 0, 0, 0)])
    image = np.kron(colors[lit].reshape(rows, columns, 4), np.ones((pixels, pixels, 1)))
    image[::pixels] = image[:, ::pixels] = 0  # the gaps between the squares
    return image


def moe(config: Config) -> Schematic:
    "The data flow of a layer with experts: what the router, the routed experts and the shared experts see and give."
    c, H, Z = config, count(config.hidden_size), count(config.routed_expert_hidden_size)
    chosen, total, nbytes = c.num_experts_per_token, c.num_experts, part_bytes(config, "expert")
    shared_width = count(c.moe_intermediate_size * c.num_shared_experts)
    d = Canvas(72.5)
    x = d.box(1, 0.5, 46, 3, f"x: {H} numbers, mixed and normed")
    router = d.box(1, 6.2, 12.6, 8.2, f"router\n{total} × {H};\na score for\neach expert", "ffn")
    down = d.box(15.8, 6.2, 16.4, 4.8, f"down\nfrom {H} to {Z}", "ffn")
    shared = d.box(
        34.4, 6.2, 12.6, 8.2, f"shared\n{c.num_shared_experts} experts,\ntogether\n{shared_width} wide", "ffn"
    )
    for box in (router, down, shared):
        d.down(x, box)
    experts = d.box(15.8, 15, 16.4, 21)
    d.write(24, 16.6, f"{total} experts", experts, BIG, weight="bold")
    d.axes.imshow(squares(total, chosen), extent=(16.8, 31.2, 30.6, 18), interpolation="none", zorder=3, aspect="auto")
    d.write(24, 32.2, f"{chosen} are read:", experts)
    d.write(24, 34, f"{chosen} × {shown_size(nbytes)}", experts)
    d.down(down, experts)
    d.tag(24, 12.8, f"z: {Z} numbers")
    d.arrow(router.at("bottom"), (router.x + router.w / 2, 25.5), experts.at("left"))
    d.tag(7.6, 20, f"{chosen} ids")
    total_box = d.box(14.3, 38.6, 19.4, 4.8, f"weighted sum\nu: {Z} numbers")
    norm = d.box(14.3, 45.8, 19.4, 3, "RMSNorm of u")
    up = d.box(14.3, 51.2, 19.4, 4.8, f"up\nfrom {Z} to {H}", "ffn")
    plus = d.plus(24, 60)
    chain = (experts, total_box, norm, up, plus)
    for one, next_one in zip(chain, chain[1:]):
        d.down(one, next_one)
    d.arrow((router.x + 2, router.y + router.h), (router.x + 2, 41), total_box.at("left"))
    d.tag(7.8, 41, f"{chosen} weights")
    d.arrow(shared.at("bottom"), (shared.x + shared.w / 2, 60), plus.at("right"))
    out = d.box(1, 63.4, 46, 3, f"y: {H} numbers")
    d.arrow(plus.at("bottom"), (24, out.y))
    d.arrow(out.at("bottom"), (24, 69.4))
    d.tag(24, 70.4, "added to the residual stream")
    return Schematic(
        d,
        f"A layer with experts. x, {H} numbers, goes three ways. The router gives one score for each of {total} "
        f"experts, and from the scores {chosen} ids and {chosen} weights. The down matrix makes z, {Z} numbers, which "
        f"the {chosen} chosen experts see; they are read from disk, {shown_size(nbytes)} each. Their weighted sum u is "
        f"normed and brought from {Z} back to {H} numbers by the up matrix. {c.num_shared_experts} shared experts, "
        f"together {shared_width} wide, work on x itself, and their result is added.",
    )


def token_bytes(config: Config) -> dict[str, int]:
    "Bytes that one token reads if nothing of the trunk is pinned and no expert is cached: {part: bytes}."
    trunk = sum(tensor_bytes(t) for L in range(config.num_hidden_layers) for t in layer_tensors(config, L, experts=()))
    embedding, *last = global_tensors(config)
    return {
        "trunk": trunk,
        "experts": layers_of(config, "moe") * config.num_experts_per_token * part_bytes(config, "expert"),
        "head": sum(map(tensor_bytes, last)),
        "embedding": tensor_bytes(embedding) // config.vocab_size,
    }


def tensor_bytes(tensor: Tensor) -> int:
    "Bytes of a tensor in the file."
    return math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]


def disk(config: Config) -> Schematic:
    "A weight's way from the device to the arithmetic: through the page cache, and past it with O_DIRECT."
    a_token = shown_size(sum(token_bytes(config).values()))
    d, w = Canvas(49), 21
    d.frame(0.6, 12.8, 46.8, 22)
    d.tag(24, 12.8, "memory")
    columns = {
        "through the page cache": [
            (15, "memory", "page cache\nthe system decides\nwhich pages stay"),
            (25.8, "plain", "our buffer\nevery byte, copied"),
        ],
        "past it, with O_DIRECT": [(25.8, "plain", f"our page buffer\nbegins at a multiple\nof {count(PAGE)} bytes")],
    }
    for x, (name, boxes) in zip((1.6, 25.4), columns.items()):
        d.tag(x + w / 2, 2, name, weight="bold", size=BIG)
        chain = [d.box(x, 5, w, 4.8, f"device\nup to {a_token} a token")]
        chain += [d.box(x, y, w, 6.8, text, kind) for y, kind, text in boxes]
        chain.append(d.box(x, 37.2, w, 3, "product"))
        for one, next_one in zip(chain, chain[1:]):
            d.down(one, next_one)
    d.tag(12.1, 23.8, "copy")
    for x, text in ((12.1, "every byte is written\nto memory twice"), (35.9, "every byte is written\nto memory once")):
        d.tag(x, 44.4, text)
    return Schematic(
        d,
        "A weight's way from the device to the product, two ways. Through the page cache: the device fills pages that "
        "belong to the system, which decides how long they stay; every byte is then copied to our buffer, so it is "
        f"written to memory twice. With O_DIRECT: the device fills our own page buffer, which begins at a multiple of "
        f"{count(PAGE)} bytes, so every byte is written to memory once, in whole pages. "
        f"Without pinned or cached weights a token reads {a_token}.",
    )


def readers(config: Config) -> Schematic:
    "The way of the trunk's blocks through the reader pool, and the order of events in a layer with experts."
    chosen, unit = config.num_experts_per_token, READ_UNIT // 1024
    d = Canvas(72)
    order = d.box(1, 0.6, 46, 4.8, "row blocks of one token, in the order of use\nthe order is known before the token")
    d.tag(12, 8.4, "before its matrix's turn", weight="bold")
    d.tag(36, 8.4, "at its matrix's turn", weight="bold")
    w = 22
    ahead = [
        d.box(1, y, w, 4.8, text, kind)
        for y, text, kind in (
            (11, "read ahead\ninto a free buffer", "memory"),
            (18, f"waits\nat most {READ_AHEAD} blocks wait", "memory"),
            (25, "multiplied\nby any reader", "kda"),
        )
    ]
    stream = [
        d.box(25, y, w, h, text, kind)
        for y, h, text, kind in (
            (11, 4.8, f"a unit is read\nat most {unit} KiB of rows", "memory"),
            (18, 6.4, "the unit is multiplied\nby the same reader, while it\nis in the core's cache", "kda"),
        )
    ]
    for box in (ahead[0], stream[0]):
        d.arrow((box.x + 1.6, order.y + order.h), (box.x + 1.6, box.y))
    for chain in (ahead, stream):
        for one, next_one in zip(chain, chain[1:]):
            d.down(one, next_one)
    free = d.box(1, 32, 46, 3, "the buffer is free again")
    d.arrow(ahead[2].at("bottom"), (12, free.y))
    d.arrow(stream[1].at("bottom"), (36, free.y))
    d.arrow((stream[1].x + w, 21.2), (47.6, 21.2), (47.6, 13.4), (stream[0].x + w, 13.4))
    d.tag(41, 27.6, "until no unit\nis left")

    y = 41.5
    d.tag(24, y - 2.4, "a layer with experts, from left to right", weight="bold", size=BIG)
    for i, name in enumerate(("trunk", "router", "experts")):
        d.tag(1, y + 3 + i * 7.4, name, ha="left", weight="bold")
    attention = d.box(8.6, y + 0.6, 9, 4.8, "attention", "kda")
    router = d.box(18.8, y + 8, 6.6, 4.8, "router", "ffn")
    shared = d.box(28, y + 0.6, 10.6, 4.8, "down, shared", "ffn", bold=False)
    experts = d.box(28, y + 15.4, 12.6, 4.8, f"{chosen} experts\nread, multiplied", "ffn")
    up = d.box(42.4, y + 0.6, 5, 4.8, "up", "ffn")
    middle = router.x + router.w / 2
    d.arrow(attention.at("right"), (middle, y + 3), router.at("top"))
    d.arrow(router.at("right"), (26.7, y + 10.4), (26.7, y + 3), shared.at("left"))
    d.arrow(router.at("bottom"), (middle, y + 17.8), experts.at("left"))
    d.arrow(shared.at("right"), up.at("left"))
    d.arrow(experts.at("right"), (up.x + up.w / 2, y + 17.8), up.at("bottom"))
    d.tag(24.7, y + 17.8, "ids")
    d.box(
        1,
        y + 22.6,
        46,
        6.6,
        "The experts' reads begin at the router's result if a buffer\nholds a whole expert. "
        "Otherwise they begin when down and\nshared are done. The lengths of the boxes are not times.",
        bold=False,
    )
    return Schematic(
        d,
        "The reader pool. Row blocks of one token are known in the order of their use. Before its matrix's turn a "
        f"block is read ahead into a free buffer, waits with at most {READ_AHEAD} others, and is multiplied by any "
        f"reader. At its matrix's turn a block that nobody has read is read in units of at most {unit} KiB; the same "
        "reader multiplies each unit while it is in the core's cache. Then the buffer is free again. Below, a layer "
        f"with experts: attention, then the router, whose ids start the reads of {chosen} experts; meanwhile the trunk "
        "goes on with the down matrix and the shared experts, and the up matrix comes when both are done. The experts' "
        "reads begin at the router's result if a buffer holds a whole expert, otherwise when down and shared are done.",
    )


PLAN_KINDS = {"KDA": "kda", "latent": "mla", "vectors": "memory", "row": "memory", "pinned": "memory", "expert": "ffn"}


def memory_plan(plan: Plan) -> Schematic:
    "What a budget is spent on: one bar from zero to the budget, and the bytes of each part."
    parts = {name: nbytes for name, nbytes in plan.parts.items() if nbytes}
    spare = max(0, plan.ram - plan.total)
    if spare:
        parts["not used"] = spare
    left, length, row = 1.0, 46.0, 3.0
    d = Canvas(15.5 + row * len(parts))
    d.tag(24, 2, f"a budget of {shown_size(plan.ram)}", weight="bold", size=BIG)
    x = left
    for i, (name, nbytes) in enumerate(parts.items()):
        w = length * nbytes / plan.ram
        kind = PLAN_KINDS.get(name.split()[0], "plain")
        d.axes.add_patch(Rectangle((x, 4.8), w, 4.6, facecolor=COLORS[kind][0], edgecolor=COLORS[kind][1], lw=1))
        if w > 2:
            d.write(x + w / 2, 7.1, str(i + 1), Box(x, 4.8, w, 4.6), weight="bold")
        y = 13.6 + i * row
        d.box(
            left,
            y,
            46,
            row - 0.4,
            f"{i + 1}  {name}",
            kind,
            f"{shown_size(nbytes)}, {nbytes / plan.ram:.1%}",
            bold=False,
        )
        x += w
    d.tag(left, 11.2, "0", ha="left")
    d.tag(left + length, 11.2, shown_size(plan.ram), ha="right")
    listed = "; ".join(f"{name} {shown_size(nbytes)}" for name, nbytes in parts.items())
    return Schematic(d, f"A budget of {shown_size(plan.ram)} as a bar that begins at zero: {listed}.")


def where_bytes_lie(config: Config) -> Schematic:
    "The bytes of the text stack in the file, and those that one token needs, as two bars of one scale."
    embedding, *last = global_tensors(config)
    head = sum(map(tensor_bytes, last))
    token = token_bytes(config)
    experts = layers_of(config, "moe") * config.num_experts * part_bytes(config, "expert")
    rows = [
        ("routed experts", "ffn", experts, token["experts"]),
        ("trunk: all other weights of the layers", "kda", token["trunk"], token["trunk"]),
        ("embedding", "memory", tensor_bytes(embedding), token["embedding"]),
        ("last mix, last norm and head", "mix", head, token["head"]),
    ]
    totals = [sum(row[i] for row in rows) for i in (2, 3)]
    d, left, length, y = Canvas(37.4), 1.0, 46.0, 15.2
    for i, (total, name) in enumerate(zip(totals, ("in the files", "one token needs"))):
        x, top = left, 3.6 + i * 6.2
        for _, kind, *nbytes in rows:
            w = length * nbytes[i] / totals[0]
            d.axes.add_patch(
                Rectangle((x, top), w, 2.4, facecolor=COLORS[kind][0], edgecolor=COLORS[kind][1], linewidth=1)
            )
            x += w
        d.tag(left, top - 1.6, f"{name}: {shown_size(total)}", ha="left", weight="bold")
    for i, (name, kind, in_file, a_token) in enumerate(rows):
        text = f"{name}\nin the files {shown_size(in_file)}"
        d.box(left, y + i * 5.4, length, 4.8, text, kind, f"a token\n{shown_size(a_token)}")
    listed = "; ".join(f"{name}: {shown_size(f)} in the files, {shown_size(t)} a token" for name, _, f, t in rows)
    return Schematic(
        d,
        f"Two bars of one scale that begin at zero. In the files: {shown_size(totals[0])}. What one token needs: "
        f"{shown_size(totals[1])}. {listed}.",
    )
