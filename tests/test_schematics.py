"book/schematics.py: text fits its box, nothing overlaps, arrows end at boxes; numbers and alternative text are right."
import base64
import functools
import inspect
import re
import sys

import common
import numpy as np
import pytest
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg

import k3lib
from k3lib.config import read_config
from k3lib.plan import make_plan

sys.path.insert(0, str(common.ROOT / "book"))
import schematics

CONFIGS = {"k3": read_config(common.FIXTURES / "k3"), "oracle13": read_config(common.MODEL)}


def plan(config):
    checkpoint = k3lib.Checkpoint(common.MODEL)
    return make_plan(read_config(common.MODEL), checkpoint, 2_000_000_000, 64)


PICTURES = {
    "architecture": schematics.architecture,
    "where": lambda config: schematics.where(config, "kda"),
    "where_every_box": lambda config: schematics.where(config, *schematics.MODEL),
    "kda": schematics.kda,
    "mla": schematics.mla,
    "item": schematics.item,
    "residual": schematics.residual,
    "mxfp4": lambda config: schematics.mxfp4(),
    "moe": schematics.moe,
    "disk": schematics.disk,
    "readers": schematics.readers,
    "memory_plan": lambda config: schematics.memory_plan(plan(config)),
    "where_bytes_lie": schematics.where_bytes_lie,
}


OF_ANY_MODEL = ("mxfp4", "memory_plan", "where_every_box")  # drawn once: these do not depend on the config
CASES = [(name, model) for name in PICTURES for model in CONFIGS if model == "k3" or name not in OF_ANY_MODEL]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def picture(request):
    name, model = request.param
    return PICTURES[name](CONFIGS[model])


@functools.cache
def extents(canvas):
    "(x0, y0, x1, y1) of each text of a canvas, tags with their ground, in the canvas's units; and the box it is in."
    renderer = FigureCanvasAgg(canvas.figure).get_renderer()
    canvas.figure.draw(renderer)
    found = []
    back = canvas.axes.transData.inverted()
    for text, box in canvas.texts:
        ground = text.get_bbox_patch()
        place = (ground or text).get_window_extent(renderer)
        (x0, y0), (x1, y1) = back.transform([(place.x0, place.y0), (place.x1, place.y1)])
        found.append((text.get_text(), box, (x0, min(y0, y1), x1, max(y0, y1))))
    return found


def test_text_fits(picture):
    "Text lies in its box, and in the picture."
    height = picture.figure.get_figheight() * 10
    for text, box, (x0, y0, x1, y1) in extents(picture.canvas):
        left, top, right, bottom = (0, 0, schematics.WIDTH, height) if box is None else (
            box.x, box.y, box.x + box.w, box.y + box.h)
        assert left <= x0 and x1 <= right and top <= y0 and y1 <= bottom, (text, box, (x0, y0, x1, y1))


def test_text_does_not_overlap(picture):
    "No two texts touch, and no tag touches a box."
    found = extents(picture.canvas)
    for i, (text, box, a) in enumerate(found):
        others = [(t, b) for t, _, b in found[:i]]
        if box is None:
            others += [(f"box {b}", (b.x, b.y, b.x + b.w, b.y + b.h)) for b in picture.canvas.boxes]
        for other, b in others:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (text, other)


def test_letters_are_large_enough(picture):
    assert min(text.get_fontsize() for text, _ in picture.canvas.texts) >= 8


def edges(canvas):
    "The rectangles at which a line may begin or end: boxes, frames and the grounds of tags."
    yield from ((b.x, b.y, b.x + b.w, b.y + b.h) for b in [*canvas.boxes, *canvas.frames])
    yield from (place for _, box, place in extents(canvas) if box is None)


def test_arrows_end_at_boxes(picture):
    "The head of each arrow touches the edge of a box, a frame or a tag."
    for points in picture.canvas.arrows:
        x, y = points[-1]
        assert any(
            (min(abs(x - x0), abs(x - x1)) < 0.25 and y0 - 0.01 <= y <= y1 + 0.01)
            or (min(abs(y - y0), abs(y - y1)) < 0.25 and x0 - 0.01 <= x <= x1 + 0.01)
            for x0, y0, x1, y1 in edges(picture.canvas)
        ), points


def test_lines_cross_no_text(picture):
    "No line runs through the text of a box. It may run behind a tag, which has its own ground."
    for text, box, (x0, y0, x1, y1) in extents(picture.canvas):
        for points in picture.canvas.arrows if box is not None else ():
            for (ax, ay), (bx, by) in zip(points, points[1:]):
                across = min(ax, bx) < x1 and x0 < max(ax, bx) if ay == by else x0 < ax < x1
                down = y0 < ay < y1 if ay == by else min(ay, by) < y1 and y0 < max(ay, by)
                assert not (across and down), (text, points)


def test_alternative_text_is_in_the_html(picture):
    "The HTML has the alternative text and an SVG."
    html = picture._repr_mimebundle_()["text/html"]
    alt = re.search(r' alt="([^"]*)"', html)[1]
    assert len(alt) > 60 and "\n" not in alt
    svg = base64.b64decode(re.search(r'src="data:image/svg\+xml;base64,([^"]*)"', html)[1])
    assert b"<svg" in svg
    figure, text = picture
    assert figure is picture.figure and text == picture.alt


def test_the_same_bytes_again():
    "A picture made again is the same SVG, also in a chapter that has set a style for its plots."
    svg = schematics.moe(CONFIGS["k3"]).svg()
    with style.context(common.ROOT / "book" / "k3.mplstyle"):
        assert svg == schematics.moe(CONFIGS["k3"]).svg()


def test_every_picture_is_tested():
    "A new function that returns a Schematic stands in PICTURES."
    made = {name for name, f in inspect.getmembers(schematics, inspect.isfunction)
            if inspect.signature(f).return_annotation is schematics.Schematic}
    assert made <= PICTURES.keys()


def test_numbers_come_from_the_config():
    "Another model gives other numbers."
    for name, make in PICTURES.items():
        if name not in OF_ANY_MODEL:
            assert make(CONFIGS["k3"]).alt != make(CONFIGS["oracle13"]).alt, name


def test_published_totals():
    "Bytes of the released text stack: the published total without the image side; and what a token reads."
    token = schematics.token_bytes(CONFIGS["k3"])
    assert token["trunk"] == 108_811_877_376
    assert token["experts"] == 92 * 16 * 17_547_264
    assert schematics.part_bytes(CONFIGS["k3"], "expert") == 17_547_264
    assert "1.56 TB" in schematics.where_bytes_lie(CONFIGS["k3"]).alt


def test_unknown_box():
    with pytest.raises(ValueError, match="no box is called attention"):
        schematics.where(CONFIGS["k3"], "attention")


def luminance(color):
    channels = np.array([int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ (0.2126, 0.7152, 0.0722)


def contrast(a, b):
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast():
    "Text on each ground, and lines on white and on a dark page, as WCAG asks for text (7) and for graphics (3)."
    for ground, edge in schematics.COLORS.values():
        assert contrast(schematics.INK, ground) >= 7
        assert contrast(edge, "#ffffff") >= 3 and contrast(edge, "#111111") >= 3
    assert contrast(schematics.INK, schematics.TAG) >= 7
    assert contrast(schematics.LINE, "#ffffff") >= 3 and contrast(schematics.LINE, "#111111") >= 3
