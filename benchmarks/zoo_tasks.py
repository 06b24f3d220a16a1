"""The tasks of the zoo's models: data whose answers are known because they are made here, and metrics on outputs.

A dataset returns (inputs by name, labels), a metric takes (outputs by name, labels); a higher metric is better. Both
stand in the zoo's release files, beside which this file is copied.
"""

import bz2
import csv
import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Dataset = tuple[dict[str, Array], Array]

_WORDS = (
    *("harbour", "seventeen", "quarter", "machine", "window", "Tuesday", "invoice", "pencil", "river", "garden"),
    *("total", "number", "street", "market", "orange", "table", "winter", "paper", "ticket", "bridge"),
)


# Text.


def _font(size: int, bold: bool = False) -> Any:
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)


def _line(index: int) -> str:
    generator = np.random.default_rng([7, index])
    words = generator.choice(_WORDS, 2, replace=False)
    return f"{words[0]} {words[1]}" if index % 2 else f"{words[0]} {generator.integers(10, 10000)}"


def _draw_line(text: str, height: int, width: int, index: int) -> Array:
    """A line of text as an image `[3, height, width]` in -1..1, dark on light, as wide as it is."""
    from PIL import Image, ImageDraw

    generator = np.random.default_rng([8, index])
    paper, ink = int(generator.integers(200, 256)), int(generator.integers(0, 80))
    font = _font(height * 2 // 3, bool(index % 3 == 0))
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("L", (int(right - left) + 16, int(bottom - top) + 12), paper)
    ImageDraw.Draw(image).text((8 - left, 6 - top), text, fill=ink, font=font)
    wide = min(width, round(image.width * height / image.height))
    pixels = np.asarray(image.resize((wide, height), Image.Resampling.BILINEAR), "float32") / 127.5 - 1
    canvas = np.zeros((3, height, width), "float32")
    canvas[:, :, :wide] = pixels
    return canvas


def lines_to_read(model: str, count: int = 24) -> Dataset:
    """Lines of text `[count, 3, 48, 320]`, and the classes of their letters, filled up with -1.

    The classes are those that the ONNX file `model` lists in its metadata; class 0 is no letter.
    """
    import onnx

    properties = {item.key: item.value for item in onnx.load(model).metadata_props}
    letters = ["", *properties["character"].splitlines(), " "]
    texts = [_line(index) for index in range(count)]
    labels = np.full((count, max(map(len, texts))), -1, "int64")
    for row, text in zip(labels, texts, strict=True):
        row[: len(text)] = [letters.index(letter) for letter in text]
    images = np.stack([_draw_line(text, 48, 320, index) for index, text in enumerate(texts)])
    return {"x": images}, labels


def letters_right(outputs: dict[str, Array], labels: Array) -> float:
    """One minus the edit distance to the text per letter, of scores `[line, place, letter]`."""
    (scores,) = outputs.values()
    distance = letters = 0
    for best, label in zip(scores.argmax(-1), labels, strict=True):
        changes = best[np.insert(best[1:] != best[:-1], 0, True)]
        text = [int(item) for item in changes if item]
        expected = [int(item) for item in label if item >= 0]
        distance += _edit_distance(text, expected)
        letters += len(expected)
    return 1 - distance / letters


def _edit_distance(left: list[int], right: list[int]) -> int:
    row = list(range(len(right) + 1))
    for position, item in enumerate(left, 1):
        before, row[0] = row[0], position
        for place, other in enumerate(right, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (item != other))
    return row[-1]


def lines_to_turn(count: int = 32) -> Dataset:
    """Lines of text `[count, 3, 48, 192]`, every second upside down, which is label 1."""
    images = [_draw_line(_line(index), 48, 192, index) for index in range(count)]
    labels = np.arange(count) % 2
    turned = [image[:, ::-1, ::-1] if label else image for image, label in zip(images, labels, strict=True)]
    return {"x": np.ascontiguousarray(np.stack(turned))}, labels


def pages(count: int = 4) -> Dataset:
    """Pages `[count, 3, 320, 480]` with lines of text, and masks `[count, 320, 480]` of the lines' boxes."""
    from PIL import Image, ImageDraw

    images, masks = [], []
    for page in range(count):
        generator = np.random.default_rng([9, page])
        image, mask = Image.new("L", (480, 320), 240), np.zeros((320, 480), bool)
        draw = ImageDraw.Draw(image)
        for row in range(4):
            place = (int(generator.integers(10, 120)), 20 + 75 * row)
            font = _font(int(generator.integers(22, 34)))
            text = _line(10 * page + row)
            draw.text(place, text, fill=int(generator.integers(0, 60)), font=font)
            left, top, right, bottom = map(int, draw.textbbox(place, text, font=font))
            mask[top:bottom, left:right] = True
        pixels = np.asarray(image, "float32") / 255
        mean, deviation = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
        images.append((pixels - mean[:, None, None]) / deviation[:, None, None])
        masks.append(mask)
    return {"x": np.stack(images).astype("float32")}, np.stack(masks)


def boxes_overlap(outputs: dict[str, Array], labels: Array) -> float:
    """The F1 score of the pixels with a text score `[page, 1, height, width]` above 0.3 against the lines' boxes."""
    (scores,) = outputs.values()
    is_text = scores[:, 0] > 0.3
    return float(2 * (is_text & labels).sum() / (is_text.sum() + labels.sum()))


# Photographs.


def photographs(size: int = 224) -> Dataset:
    """Parts of scikit-learn's two photographs, `[24, 224, 224, 3]` in the order BGR less the mean; all are harmless."""
    crops = _crops(size)
    images = crops[..., ::-1].astype("float32") - np.float32([104, 117, 123])
    return {"input:0": images}, np.zeros(len(images), "int64")


def _crops(size: int) -> Array:
    """Parts of both photographs, `[24, size, size, 3]` in 0..255, twelve of each."""
    from sklearn.datasets import load_sample_images

    crops = []
    for photograph in load_sample_images().images:
        for index in range(12):
            top, left = divmod(index, 4)
            y = top * (photograph.shape[0] - 2 * size + size // 2) // 2
            x = left * (photograph.shape[1] - size) // 3
            crops.append(photograph[y : y + size, x : x + size])
    return np.stack(crops)


# Sound.


def _speech(seconds: float, seed: int, rate: int = 16000) -> Array:
    """Something like speech in -1..1: a voice's pulses through the resonances of changing vowels, in syllables."""
    from scipy.signal import lfilter

    generator = np.random.default_rng([11, seed])
    samples = int(seconds * rate)
    time = np.arange(samples) / rate
    pitch = float(generator.uniform(90, 220)) * (1 + 0.1 * np.sin(2 * np.pi * 0.7 * time + seed))
    phase = np.cumsum(pitch) / rate
    pulses = np.diff(np.floor(phase), prepend=0.0) + 0.01 * generator.standard_normal(samples)
    vowels = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))
    voice = np.zeros(samples)
    start = 0
    while start < samples:
        length = int(generator.uniform(0.12, 0.3) * rate)
        part = pulses[start : start + length]
        for formant in vowels[int(generator.integers(len(vowels)))]:
            radius, angle = np.exp(-np.pi * 80 / rate), 2 * np.pi * formant / rate
            part = lfilter([1 - radius], [1, -2 * radius * np.cos(angle), radius**2], part)
        envelope = np.sin(np.linspace(0, np.pi, len(part))) ** 0.5
        voice[start : start + length] = part / (np.abs(part).max() + 1e-9) * envelope
        start += length + int(generator.uniform(0, 0.1) * rate)
    return (0.3 * voice).astype("float32")


def speech_in_noise(samples: int, levels: int = 12) -> Dataset:
    """Speech `[levels, samples]` in ever less noise; the labels are the ranks, the last is the cleanest."""
    waves = []
    for level in range(levels):
        voice = _speech(samples / 16000, seed=1)
        noise = np.random.default_rng([12, level]).standard_normal(samples)
        waves.append(voice + 0.3 * 10 ** (-level * 5 / 20) * noise)
    return {"input_1": np.stack(waves).astype("float32").clip(-1, 1)}, np.arange(levels)


def spectra_of_speech(frames: int, bins: int, levels: int = 12) -> Dataset:
    """Power spectra in decibels `[levels, frames, bins]` of speech in ever less noise, with the ranks as labels."""
    waves = speech_in_noise((frames + 2) * 160, levels)[0]["input_1"]
    starts = np.arange(frames) * 160
    window = np.hanning(320)
    parts = waves[:, starts[:, None] + np.arange(320)] * window
    power = np.abs(np.fft.rfft(parts, axis=-1)) ** 2
    edges = np.linspace(0, power.shape[-1], bins + 1).astype(int)
    bands = np.add.reduceat(power, edges[:-1].clip(0, power.shape[-1] - 1), axis=-1)
    decibels = 10 * np.log10(np.maximum(bands, 1e-10))
    loudest = decibels.max(axis=(1, 2), keepdims=True)
    return {"input_1": ((np.maximum(decibels, loudest - 80) - loudest + 40) / 40).astype("float32")}, np.arange(levels)


def ranks_kept(outputs: dict[str, Array], labels: Array) -> float:
    """Spearman's correlation of the mean score `[level, ...]` with the levels."""
    from scipy.stats import spearmanr

    (scores,) = outputs.values()
    return float(spearmanr(scores.reshape(len(labels), -1).mean(-1), labels).statistic)


def notes(count: int = 24) -> Dataset:
    """Two seconds `[count, 43844, 1]` of one note with overtones each; labels are semitones above the lowest A."""
    time = np.arange(43844) / 22050
    generator = np.random.default_rng(13)
    labels = generator.integers(15, 63, count)
    waves = []
    for label in labels:
        pitch = 27.5 * 2 ** (label / 12)
        waves.append(sum(np.sin(2 * np.pi * pitch * k * time) * 0.5**k for k in range(1, 6)) * np.exp(-time))
    return {"serving_default_input_2:0": 0.5 * np.stack(waves).astype("float32")[..., None]}, labels


def notes_right(outputs: dict[str, Array], labels: Array) -> float:
    """The share of notes whose pitch has the largest mean score, of scores `[note, time, 88]`."""
    scores = sum(value for value in outputs.values() if value.shape[-1] == 88)
    return float((np.asarray(scores).mean(1).argmax(-1) == labels).mean())


# Files.


def files(kinds: str) -> Dataset:
    """The ends of files of known kinds as bytes `[file, 2048]`, 256 for none; labels are places in the list of kinds.

    `kinds` is the JSON file of the model that lists them.
    """
    names = json.loads(Path(kinds).read_text())["target_labels_space"]
    rows, labels = [], []
    for name, content in _contents():
        ends = content[:4096].strip()[:1024], content[-4096:].strip()[-1024:]
        rows.append([*ends[0], *[256] * (1024 - len(ends[0])), *[256] * (1024 - len(ends[1])), *ends[1]])
        labels.append(names.index(name))
    return {"bytes": np.array(rows, "int32")}, np.array(labels)


def _contents() -> list[tuple[str, bytes]]:
    from PIL import Image

    contents = [("python", Path(module.__file__ or "").read_bytes()) for module in (csv, gzip, json, tarfile, zipfile)]
    source = contents[0][1]
    records = [{"name": word, "size": len(word), "parts": [index, word[0]]} for index, word in enumerate(_WORDS)]
    contents.append(("json", json.dumps(records, indent=1).encode()))
    rows = [f"{index},{word},{len(word) * 1.5},{word.upper()}" for index, word in enumerate(_WORDS * 4)]
    contents.append(("csv", "\n".join(["id,name,price,code", *rows]).encode()))
    items = "".join(f"<li class='item'><a href='/{word}'>{word}</a></li>\n" for word in _WORDS)
    head = "<!DOCTYPE html>\n<html><head><title>List</title><meta charset='utf-8'></head>\n"
    contents.append(("html", f"{head}<body><h1>All</h1><ul>\n{items}</ul></body></html>\n".encode()))
    cells = "".join(f'  <item id="{index}"><name>{word}</name></item>\n' for index, word in enumerate(_WORDS))
    contents.append(("xml", f'<?xml version="1.0" encoding="UTF-8"?>\n<items>\n{cells}</items>\n'.encode()))
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for kind, name in (("PNG", "png"), ("JPEG", "jpeg"), ("BMP", "bmp"), ("GIF", "gif")):
        stream = io.BytesIO()
        image.save(stream, kind)
        contents.append((name, stream.getvalue()))
    contents += [("gzip", gzip.compress(source, mtime=0)), ("bzip", bz2.compress(source))]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("csv.txt", source)
    contents.append(("zip", stream.getvalue()))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tape:
        entry = tarfile.TarInfo("csv.py")
        entry.size = len(source)
        tape.addfile(entry, io.BytesIO(source))
    contents.append(("tar", stream.getvalue()))
    return contents
