"""The tasks of the zoo's models: data with known answers, which are made here or come with a package, and metrics.

The tasks of models that are also in `examples/` are there. A dataset returns (inputs by name, labels), a metric takes
(outputs by name, labels); a higher metric is better. The zoo's release files name both, and this file is copied beside
them.
"""

import bz2
import csv
import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np

from tvmflow.arrays import Array

Dataset = tuple[dict[str, Array], Array]

_WORDS = (
    *("harbour", "seventeen", "quarter", "machine", "window", "Tuesday", "invoice", "pencil", "river", "garden"),
    *("total", "number", "street", "market", "orange", "table", "winter", "paper", "ticket", "bridge"),
)


# Text.


def lines_to_turn(count: int = 32) -> Dataset:
    """Return lines of text `[count, 3, 48, 192]`, every second upside down, which is label 1."""
    from data import draw_line, prepare_line

    images = np.concatenate([prepare_line(draw_line(index), 192) for index in range(count)])
    labels = np.arange(count) % 2
    return {"x": np.where(labels[:, None, None, None], images[:, :, ::-1, ::-1], images)}, labels


def sentences(tokenizer: str) -> Dataset:
    """Return the tokenized sentences of `examples/embeddings`.

    A row of the labels is the index of the sentence's paraphrase, followed by the attention mask. `tokenizer` is the
    path of the tokenizer's file.
    """
    from data import paraphrases

    inputs, labels = paraphrases(tokenizer)
    ids, mask = inputs["ids"], inputs["mask"]
    tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return tensors, np.concatenate([labels[:, None], mask], 1)


def sentences_nearest(outputs: dict[str, Array], labels: Array) -> float:
    """Return the share of sentences nearest to their paraphrase, by the means of states `[sentence, token, 384]`."""
    from data import paraphrases_nearest

    (states,) = outputs.values()
    means = (states * labels[:, 1:, None]).sum(1)
    return float(paraphrases_nearest({"means": means / np.linalg.norm(means, axis=1, keepdims=True)}, labels[:, 0]))


# Photographs.


def photographs(size: int = 224) -> Dataset:
    """Return parts of scikit-learn's two photographs as `[24, size, size, 3]`; all have the label 0, harmless.

    The channels are in the order BGR, less the means 104, 117 and 123.
    """
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


def things(photographs: str, size: int = 224) -> Dataset:
    """Return parts of photographs `[30, 3, size, size]` of five things, and the right classes of ImageNet for each.

    `photographs` is the folder with scikit-image's; two are scikit-learn's. Rows of classes are filled up with -1.
    """
    from PIL import Image
    from sklearn.datasets import load_sample_images

    palace, dahlia = load_sample_images().images
    cat, coffee, rocket = (
        np.asarray(Image.open(Path(photographs) / name).convert("RGB"))
        for name in ("chelsea.png", "coffee.png", "rocket.jpg")
    )
    images, labels = [], []
    classes = ((281, 282, 285, 287), (504, 925, 967, 968), (657, 744, 812), (497, 663, 668, 698), (985, 985))
    for photograph, right in zip((cat, coffee, rocket, palace, dahlia), classes, strict=True):
        side = min(photograph.shape[:2])
        for index in range(6):
            part = side * (10 - index // 2) // 10
            top, left = (photograph.shape[0] - part) // 2, (photograph.shape[1] - part) // 2
            square = Image.fromarray(photograph[top : top + part, left : left + part])
            pixels = np.asarray(square.resize((size, size), Image.Resampling.BICUBIC), "float32")
            images.append((pixels[:, :: -1 if index % 2 else 1].transpose(2, 0, 1) - 127) / 128)
            labels.append([*right, *[-1] * (4 - len(right))])
    return {"image": np.stack(images).astype("float32")}, np.array(labels)


def things_right(outputs: dict[str, Array], labels: Array) -> float:
    """Return the share of images whose likeliest class, of scores `[image, class]`, is one of the right ones."""
    (scores,) = outputs.values()
    return float((scores.argmax(-1)[:, None] == labels).any(1).mean())


def faces(pictures: str, size: int) -> Dataset:
    """Return a hundred faces and a hundred parts of photographs without one, `[200, 3, size, size]`.

    Faces have label 1. `pictures` is scikit-image's file of them, grey and 25x25.
    """
    from PIL import Image

    images = [
        Image.fromarray((picture * 255).clip(0, 255).astype("uint8")).resize((size, size), Image.Resampling.BILINEAR)
        for picture in np.load(pictures)
    ]
    pixels = (np.stack([np.asarray(image, "float32") for image in images]) - 127.5) / 128
    return {"image": pixels[:, None].repeat(3, 1)}, (np.arange(len(images)) < 100).astype("int64")


def faces_right(outputs: dict[str, Array], labels: Array) -> float:
    """Return the share of pictures whose score `[picture, 2, ...]` says correctly whether it is a face."""
    scores = next(iter(outputs.values())).reshape(len(labels), 2)
    return float(((scores[:, 1] > 0.5) == labels).mean())


# Sound.

_SENTENCES = (
    "The harbour closes at seventeen minutes past eight, and the ferry does not wait.",
    "Please leave the parcel with the neighbour on the second floor.",
    "Every morning she walks along the river before the market opens.",
    "Two thirds of the tickets were sold within the first hour.",
)
# Speakers: variants of espeak-ng's English, each with a pitch.
_VOICES = (("en+m1", 20), ("en+f2", 80), ("en+m7", 35), ("en+f4", 95), ("en-us+m3", 55), ("en-gb-scotland+m4", 5))


def _speech(synthesiser: str, seconds: float | None = None, sentence: int = 0, voice: int = 0) -> Array:
    """A wave `[samples]` of 16 kHz in -0.5..0.5; `seconds` long, with further sentences, where they are given."""
    from speech import Synthesiser

    name, pitch = _VOICES[voice % len(_VOICES)]
    speaker = Synthesiser(Path(synthesiser))
    parts = [speaker.say(_SENTENCES[sentence % len(_SENTENCES)], name, pitch)]
    while seconds is not None and sum(map(len, parts)) < seconds * 16000:
        sentence += 1
        parts.append(speaker.say(_SENTENCES[sentence % len(_SENTENCES)], name, pitch))
    wave: Array = np.concatenate(parts)[: None if seconds is None else round(seconds * 16000)]
    return wave / (2 * np.abs(wave).max())


def _speech_in_noise(synthesiser: str, samples: int, levels: int) -> Array:
    """Speech `[levels, samples]` in ever less noise."""
    voice = _speech(synthesiser, samples / 16000)
    noises = [np.random.default_rng([12, level]).standard_normal(samples) for level in range(levels)]
    waves = [voice + 0.3 * 10 ** (-level * 5 / 20) * noise for level, noise in enumerate(noises)]
    return np.stack(waves).astype("float32").clip(-1, 1)


def speech_in_noise(synthesiser: str, samples: int, levels: int = 12) -> Dataset:
    """Return speech `[levels, samples]` in ever less noise; the labels are the ranks, the last is the cleanest.

    `synthesiser` is the folder of espeak-ng, here as below.
    """
    return {"input_1": _speech_in_noise(synthesiser, samples, levels)}, np.arange(levels)


def spectra_of_speech(synthesiser: str, frames: int, bands: int | None = None, levels: int = 12) -> Dataset:
    """Return spectra `[levels, frames, bands]` of speech in ever less noise, with the ranks as labels.

    They are mel spectra in decibels, or logarithms of the power at 161 frequencies without `bands`.
    """
    waves = _speech_in_noise(synthesiser, (frames + 2) * 160, levels)
    if bands is None:
        spectra = np.log10(np.maximum(_power(waves, 320, 160, np.hanning(320)), 1e-12))
    else:
        spectra = (_decibels(_mel_power(waves, 321, 160, bands)) + 40) / 40
    return {"input_1": spectra[:, :frames].astype("float32")}, np.arange(levels)


def _power(waves: Array, length: int, hop: int, window: Array) -> Array:
    """The power spectra `[..., frames, length // 2 + 1]` of waves `[..., samples]`."""
    starts = np.arange(0, waves.shape[-1] - length + 1, hop)
    return np.asarray(np.abs(np.fft.rfft(waves[..., starts[:, None] + np.arange(length)] * window, axis=-1)) ** 2)


def _decibels(power: Array) -> Array:
    """Power `[level, frame, band]` in decibels, 0 for each level's loudest and -80 at least."""
    decibels = 10 * np.log10(np.maximum(power, 1e-10))
    loudest = decibels.max(axis=(1, 2), keepdims=True)
    return np.asarray(np.maximum(decibels, loudest - 80) - loudest)


def _mel_power(waves: Array, length: int, hop: int, bands: int) -> Array:
    """Mel spectra `[wave, frame, band]` of 16 kHz, with Slaney's scale and areas (Auditory Toolbox, 1998)."""
    from scipy.signal import get_window

    frequencies = np.linspace(0, 8000, length // 2 + 1)
    steps = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), bands + 2)
    centres = np.where(steps < 15, steps * 200 / 3, 1000 * np.exp((steps - 15) * np.log(6.4) / 27))
    rising = (frequencies[:, None] - centres[:-2]) / np.diff(centres)[:-1]
    falling = (centres[2:] - frequencies[:, None]) / np.diff(centres)[1:]
    weights = np.maximum(0, np.minimum(rising, falling)) * 2 / (centres[2:] - centres[:-2])
    padded = np.pad(waves, ((0, 0), (length // 2, length // 2)))
    return np.asarray(_power(padded, length, hop, get_window("hann", length)) @ weights)


def losses(synthesiser: str, frames: int = 200, levels: int = 12) -> Dataset:
    """Return log power spectra of speech with ever fewer lost packets, a rater's vector, and the ranks as labels.

    The spectra are `[levels, 1, frames, 257]`.
    """
    waves = _speech(synthesiser, (frames + 1) * 256 / 16000)[None].repeat(levels, 0)
    packets = waves.reshape(levels, -1, 256)
    for level in range(levels):
        is_lost = np.random.default_rng([14, level]).random(packets.shape[1]) < 0.5 - level * 0.5 / (levels - 1)
        packets[level, is_lost] = 0
    spectra = _power(waves, 512, 256, np.hamming(513)[:-1])
    quietest = np.where(spectra > 0, spectra, np.inf).min(axis=(1, 2), keepdims=True)
    floor = quietest * 10**-12.0
    rater = np.random.default_rng(15).standard_normal((1, 64)).repeat(levels, 0)
    values = np.log(np.maximum(spectra, floor)) / 20
    return {
        "degraded_audio": values[:, None, None].astype("float32"),
        "rater_embed": rater[:, None].astype("float32"),
    }, np.arange(levels)


def echoes(synthesiser: str, frames: int = 240, levels: int = 12, has_markers: bool = True) -> Dataset:
    """Return mel spectra `[levels, 1, 3, frames, 160]` of far end, microphone and output, and zero first states.

    Each level has less echo in the output than the one before; the labels are the ranks. With `has_markers`, the last
    40 frames are no sound, but say that both ends speak.
    """
    count = frames - 40 if has_markers else frames
    length = (count - 1) * 256 / 16000
    far, near = _speech(synthesiser, length, 1, voice=1), _speech(synthesiser, length, 2, voice=0)
    echo = 0.6 * np.concatenate([np.zeros(1600), far[:-1600]])
    outputs = [near + echo * 10 ** (-level * 4 / 20) for level in range(levels)]
    waves = np.stack([wave for output in outputs for wave in (far, near + echo, output)])
    spectra = (_decibels(_mel_power(waves, 513, 256, 160)) + 40) / 40
    features = spectra.reshape(levels, 1, 3, -1, 160)[..., :count, :]
    if has_markers:
        marks = np.concatenate([np.ones((levels, 1, 3, 20, 160)), np.zeros((levels, 1, 3, 20, 160))], axis=3)
        features = np.concatenate([features, marks], axis=3)
    return {
        "input": features.astype("float32"),
        "h0": np.zeros((levels, 4, 1, 64), "float32"),
    }, np.arange(levels)


def voices(synthesiser: str) -> Dataset:
    """Return mel spectra `[12, 320, 40]` of six speakers who say two sentences each; labels are the speakers."""
    spoken = [_speech(synthesiser, 3.3, sentence, voice) for voice in range(len(_VOICES)) for sentence in (0, 2)]
    # The encoder was trained on speech of -30 dB.
    waves = [wave * 10**-1.5 / np.sqrt((wave**2).mean()) for wave in spoken]
    return {"mels": _mel_power(np.stack(waves), 400, 160, 40)[:, :320].astype("float32")}, np.arange(len(spoken)) // 2


def voices_right(outputs: dict[str, Array], labels: Array) -> float:
    """Return the share of utterances whose nearest other, of unit vectors `[utterance, 256]`, has the same speaker."""
    (vectors,) = outputs.values()
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -1)
    return float((labels[likeness.argmax(1)] == labels).mean())


def ranks_kept(outputs: dict[str, Array], labels: Array) -> float:
    """Return Spearman's correlation of the mean score `[level, ...]` with the levels."""
    from scipy.stats import spearmanr

    (scores,) = outputs.values()
    return float(spearmanr(scores.reshape(len(labels), -1).mean(-1), labels).statistic)


def echo_ranks_kept(outputs: dict[str, Array], labels: Array) -> float:
    """Return Spearman's correlation of the first score `[level, score]`, that of the echo, with the levels."""
    return ranks_kept({name: scores[:, :1] for name, scores in outputs.items()}, labels)


def notes(count: int = 24) -> Dataset:
    """Return two seconds `[count, 43844, 1]` of one note with overtones each.

    Labels are semitones above the lowest A.
    """
    time = np.arange(43844) / 22050
    generator = np.random.default_rng(13)
    labels = generator.integers(15, 63, count)
    waves = []
    for label in labels:
        pitch = 27.5 * 2 ** (label / 12)
        waves.append(sum(np.sin(2 * np.pi * pitch * k * time) * 0.5**k for k in range(1, 6)) * np.exp(-time))
    return {"serving_default_input_2:0": 0.5 * np.stack(waves).astype("float32")[..., None]}, labels


def notes_right(outputs: dict[str, Array], labels: Array) -> float:
    """Return the share of notes whose pitch has the largest mean score, of scores `[note, time, 88]`."""
    scores = sum(value for value in outputs.values() if value.shape[-1] == 88)
    return float((np.asarray(scores).mean(1).argmax(-1) == labels).mean())


# Series and tables.


def series(count: int = 16, length: int = 2048, horizon: int = 48) -> Dataset:
    """Return series `[count, 2048]` in 0..1 of a trend, two seasons and noise, all valid, and their next 48 values."""
    time = np.arange(length + horizon)
    rows = []
    for index in range(count):
        generator = np.random.default_rng([16, index])
        period, share = generator.integers(12, 96), generator.uniform(0.1, 0.6)
        row = np.sin(2 * np.pi * time / period) + share * np.sin(2 * np.pi * time / (7 * period))
        rows.append(row + generator.uniform(-1, 1) * time / length + 0.1 * generator.standard_normal(len(time)))
    values = np.stack(rows)
    low, high = values[:, :length].min(1, keepdims=True), values[:, :length].max(1, keepdims=True)
    values = ((values - low) / (high - low)).astype("float32")
    inputs = values[:, :length]
    return {"values": inputs, "is_valid": np.ones_like(inputs, bool)}, values[:, length:]


def forecast_skill(outputs: dict[str, Array], labels: Array) -> float:
    """Return one minus the mean error of the median over the error of a constant forecast.

    The outputs are quantiles `[series, 48, 9]`.
    """
    (quantiles,) = outputs.values()
    error = np.abs(quantiles[..., 4] - labels).mean()
    return float(1 - error / np.abs(labels.mean(1, keepdims=True) - labels).mean())


def table(name: str) -> Dataset:
    """Return every fourth row `[row, column]` of a data set of scikit-learn's, on which no model was trained."""
    from sklearn import datasets

    inputs, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    return {"x": inputs[::4].astype("float32")}, labels[::4]


def labels_right(outputs: dict[str, Array], labels: Array) -> float:
    """Return the share of rows whose label, the first output, is right."""
    return float((next(iter(outputs.values())).reshape(-1) == labels).mean())


def explained(outputs: dict[str, Array], labels: Array) -> float:
    """Return the share of the variance that a regression `[row, 1]` explains."""
    (values,) = outputs.values()
    return float(1 - ((values.reshape(-1) - labels) ** 2).mean() / labels.var())


# Files.


def files(kinds: str) -> Dataset:
    """Return the ends of files of known kinds as bytes `[file, 2048]`, 256 for none.

    Labels are places in the list of kinds, which is in `kinds`, the JSON file of the model.
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
