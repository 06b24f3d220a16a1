"""The page of a release: what it says, that its data has every figure, and that nothing overflows a phone."""

import html
import io
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support import scale
from support.releases import make_compared, make_measurements, make_release, make_target, make_verdict
from support.reports import (
    data_of,
    figures_of,
    measure_hidden,
    measure_overflow,
    unexplained_figures,
    unmarked_figures,
)
from support.skips import needs
from tasks.insight import draw
from tasks.show import Text, write_text
from tvmflow.comparison import Interval
from tvmflow.documents.encoding import decode, encode
from tvmflow.documents.release import Making, Provenance, Release, Tuning
from tvmflow.documents.training import Training
from tvmflow.documents.verdict import Answer, Check
from tvmflow.report import charts
from tvmflow.report.changes import compare_releases, find_slowdowns
from tvmflow.report.drift import find_drifts, find_steps
from tvmflow.report.insight import Drawing, FunctionTime, Insight, Layer, Level, Peaks, SampleInsight
from tvmflow.report.layers import layer_rows, times_of
from tvmflow.report.page import number, read_data, table
from tvmflow.report.pictures import draw_png, find_charts
from tvmflow.report.release import shorten, update_page, write_difference, write_page
from tvmflow.report.release_data import make_data
from tvmflow.report.trust import ChannelEvent, Promotion, Standing
from tvmflow.spec import Policy
from tvmflow.spec.channels import ChannelGates

_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="


def _release(version: str, p50: float, *, onnx: str = "a", reasons: tuple[str, ...] = ()) -> Release:
    """A release with one target, measured at `p50` ms."""
    tuning = Tuning(
        trials=9, coverage="3 of 4 workloads tuned", tuned=3, workloads=4, share_of_time=None, untimed=4,
        shipped="tuned", ratio_untuned=0.9,
    )  # fmt: skip
    target = make_target(
        sha256=version[-1] * 64,
        size=1_000_000 + int(version),
        verdict=make_verdict(0.90625, *reasons).model_copy(update={"metric_original": 0.9375}),
        measurements=make_measurements(p50),
        tuning=tuning,
    )
    return make_release(
        "net",
        version,
        target,
        provenance=Provenance(onnx=f"sha256:{onnx * 64}", opset=18),
        channels={"production": Policy(gates=ChannelGates(max_metric_drop=0.01))},
    )


def _sample(index: int, answer: int, **drawing: Any) -> SampleInsight:
    item = Drawing(name="x", shape=(1, 8, 8), values="1, 2, 3", **drawing)
    return SampleInsight(index=index, error=1e-5, answer=answer, original_answer=3, label="3", inputs=(item,))


def _layer(index: int, **values: Any) -> Layer:
    """A convolution of a network of many blocks, each of which adds its input to its result."""
    block = f"stage{index // 50}.block{index // 2}"
    return Layer(
        function=f"fused_conv2d_add{index % 7}",
        rule="conv2d",
        scope=(f"stage{index // 50}", block, f"{block}.conv{index % 2}"),
        operators=("Conv", "Relu"),
        nodes=(f"node_conv_{index}",),
        reads=tuple(source for source in (index - 1, index - 2) if source >= 0 and (index % 2 or source == index - 1)),
        shape=(1, 56, 56, 64),
        ms=0.05 + index / 1000,
        gflop=0.2 + index / 100,
        megabytes=1.5 + index / 10,
        error=1e-7 * index,
    ).model_copy(update=values)


_LAYERS = (*(_layer(index) for index in range(199)), _layer(199, gflop=0.0, nodes=(), operators=(), error=None))
_PEAKS = Peaks(
    processor="Some processor",
    threads=2,
    gigahertz=3.1,
    gflops=384.5,
    levels=(
        Level(name="second cache", bytes=4e6, gigabytes_per_second=140.25),
        Level(name="memory", bytes=None, gigabytes_per_second=28.75),
    ),
)
_BEFORE = {"native": {"stage0.block0.conv0": 0.0125, "stage9.gone": 0.5}}
_INSIGHT = Insight(
    layers=_LAYERS,
    peaks=_PEAKS,
    functions=(
        FunctionTime(
            name="fused_conv2d_add_relu_with_a_name_that_is_rather_long_for_a_phone", calls=2, ms=3.0, bytes=6000
        ),
        FunctionTime(name="softmax", calls=1, ms=1.0, bytes=0),
    ),
    worst=(_sample(7, 3, image=_PNG), _sample(8, 3, wave=((-1.0, 1.0), (-0.5, 0.25)))),
    flipped=(_sample(9, 4),),
    flips=1,
    samples=360,
)


_CHECK = Check(name="max_metric_drop", message="it has dropped", passed=True, value=0.90625, bound=0.9)


@pytest.fixture(scope="module")
def page() -> str:
    """The page of release 3 with release 2 in production."""
    history = (_release("1", 1.0), _release("2", 2.0))
    return write_page(
        make_data(
            _release("3", 2.5, onnx="b"), "production", history[1], history, {"native": _INSIGHT}, (_CHECK,), _BEFORE
        )
    )


def test_every_figure_of_the_page_is_in_its_data(page: str) -> None:
    assert len(figures_of(page)) > 1000
    assert unexplained_figures(page) == []
    assert unmarked_figures(page) == []


def test_the_sections_are_in_the_order_of_a_decision(page: str) -> None:
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", page) == [
        "Verdict",
        "Against production",
        "Worst samples",
        "Accuracy over latency",
        "Where the time goes",
        "What changed since production",
        "Trust",
        "Roll back",
    ]


# A row of three or four cells, as the first of four is the target.
_FACT = r'<tr><th scope="row">(?:[^<]*</th><td>)?([^<]*)</t[hd]><td>([^<]*)</td><td>([^<]*)</td></tr>'


def _facts(page: str) -> dict[str, tuple[str, str]]:
    """The facts that the page says have changed, with their values in production and now."""
    section = page.partition('<h2 id="what-changed-since-production">')[2].partition("</section>")[0]
    rows = re.findall(_FACT, section)
    return {name: (before, now) for name, before, now in rows}


def _made(version: str, *, records: str, lr: float, data: str, code: dict[str, str], numpy: str) -> Release:
    release = _release(version, 1.0)
    making = Making(
        records=records * 64, options="c" * 64, code="d" * 64, compiler={"TVM": "0.27", "LLVM": "20"}, signer="e" * 64
    )
    training = Training(function="train:fit", arguments={"lr": lr}, files={"data.csv": data * 64})
    origin = release.provenance.model_copy(
        update={"training": training, "held_out": "9" * 64, "code": code, "packages": {"numpy": numpy, "six": "1.17"}}
    )
    target = release.targets[0].model_copy(update={"making": making})
    return release.model_copy(update={"provenance": origin, "targets": (target,)})


def test_the_page_names_the_data_the_code_the_packages_and_the_records_that_changed() -> None:
    before = _made("1", records="a", lr=0.1, data="1", code={"model.py": "5" * 64, "old.py": "6" * 64}, numpy="2.3")
    # A release from the store, whose keys are sorted.
    before = decode(Release, encode(before), "")
    now = _made("2", records="b", lr=0.2, data="2", code={"model.py": "7" * 64}, numpy="2.4")
    facts = _facts(write_page(make_data(now, "production", before, (before,), {}, ())))
    assert facts == {
        "training arguments": ("{&quot;lr&quot;: 0.1}", "{&quot;lr&quot;: 0.2}"),
        "training file data.csv": ("111111111111…", "222222222222…"),
        "code file model.py": ("555555555555…", "777777777777…"),
        "code file old.py": ("666666666666…", "-"),
        "package numpy": ("2.3", "2.4"),
        "processor": ("not recorded", "not recorded"),
        "threads": ("not recorded", "not recorded"),
        "tuning records": ("aaaaaaaaaaaa…", "bbbbbbbbbbbb…"),
        "bundle": ("111111111111…", "222222222222…"),
    }
    # A release of before says nothing of them, which is no change of every package.
    old = _facts(write_page(make_data(now, "production", _release("1", 1.0), (), {}, ())))
    assert (old["packages"], old["code files"], old["held-out data"]) == (
        ("not recorded", "recorded"),
        ("not recorded", "recorded"),
        ("not recorded", "999999999999…"),
    )
    assert "package numpy" not in old


_UNRECORDED = {
    *("training function", "training arguments", "training files", "held-out data", "code files", "packages"),
    *("processor", "threads", "tuning records", "build options", "compiler", "compiler's code"),
}


def test_what_both_releases_do_not_record_is_not_the_same() -> None:
    old = _release("1", 1.0)
    older = old.model_copy(update={"targets": tuple(item.model_copy(update={"tuning": None}) for item in old.targets)})
    for release, names in ((old, _UNRECORDED), (older, {*_UNRECORDED, "tuning"})):
        page = write_difference(release, release)
        rows = re.findall(_FACT, page)
        assert {name.replace("&#x27;", "'"): values for name, *values in rows} == {
            name: ["not recorded", "not recorded"] for name in names
        }
        assert "are the same" not in page
        assert {change["name"] for change in data_of(page)["changes"] if change["now"] == "not recorded"} == names
    assert {change.name: change.same for change in compare_releases(old, old)} == {
        **dict.fromkeys((change.name for change in compare_releases(old, old)), True),
        **dict.fromkeys(_UNRECORDED),
        # These were not measured.
        **dict.fromkeys(("p99 latency, ms", "first run, ms", "reference kernel, us")),
    }


def test_a_release_that_trained_nothing_says_so() -> None:
    trained = _made("1", records="a", lr=0.1, data="1", code={"model.py": "5" * 64}, numpy="2.3")
    origin = trained.provenance.model_copy(update={"training": None})
    changes = compare_releases(trained.model_copy(update={"provenance": origin}), trained)
    assert {change.name: change.now for change in changes if change.name.startswith("training")} == {
        "training function": "-",
        "training arguments": "-",
        "training file data.csv": "-",
    }


def test_a_target_of_one_release_alone_is_named_on_both_pages() -> None:
    one = make_release("net", "1", make_target("native"))
    both = make_release("net", "2", make_target("native"), make_target("other", measurements=make_measurements(2.0)))
    bundle, p50 = "000000000000…", '<data value="2.0">2</data>'
    for page, facts, figures in (
        (write_difference(both, one), ("-", bundle), ("-", p50)),
        (write_difference(one, both), (bundle, "-"), (p50, "-")),
    ):
        assert '<th scope="row">other</th><td>bundle</td><td>{}</td><td>{}</td>'.format(*facts) in page
        figure = re.findall(r'<th scope="row">other</th><td>p50 latency, ms</td>(.*?)</tr>', page)
        assert re.findall(r"<td[^>]*>(.*?)</td>", figure[0]) == [*figures, "-"]


def test_the_latency_at_every_size_stands_beside_production_s() -> None:
    def release(version: str, *latencies: float) -> Release:
        (first, *others) = (make_measurements(latency).typical for latency in latencies)
        sizes = [{"batch": 64, "length": 8}, {"batch": 7}][: len(others)]
        points = (first, *(point.model_copy(update={"sizes": size}) for point, size in zip(others, sizes, strict=True)))
        measurements = make_measurements(1.0).model_copy(update={"points": points})
        return make_release("net", version, make_target(measurements=measurements))

    before, now = release("1", 1.0, 4.0), release("2", 1.0, 5.0, 6.0)
    text = write_page(make_data(now, "production", before, (before,), {}, ()))
    rows = re.findall(r'<tr><th scope="row">(p50[^<]*)</th>(.*?)</tr>', text)
    assert "<caption>Figures, native</caption>" in text
    assert {name: re.sub("<[^>]*>", " ", cells).split() for name, cells in rows} == {
        "p50 latency, ms": ["1", "1", "1.000"],
        "p50 at batch 64 and length 8, ms": ["4", "5", "1.250"],
        "p50 at batch 7, ms": ["-", "6", "-"],
    }
    assert unexplained_figures(text) == []


def test_loading_has_the_values_of_all_rounds_beside_production_s() -> None:
    before, now = _release("1", 1.0), _release("2", 1.0)
    text = write_page(make_data(now, "production", before, (before,), {}, ()))
    (table,) = re.findall(r"<caption>Loading, in a fresh process for each round, native</caption>.*?</table>", text)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]]
    assert [[re.sub("<[^>]*>", "", value) for value in row] for row in rows] == [
        [figure, version, *values, "3"]
        for figure, values in {
            "load, s": ("0.25", "0.21 to 0.375"),
            "peak memory, MB": ("121", "120 to 123.5"),
        }.items()
        for version in ("1", "2")
    ]
    assert unexplained_figures(text) == []


_STANDING = Standing(
    when="2026-11-24T10:00:00+00:00",
    signer="ab" * 32,
    is_checked=False,
    events=(
        ChannelEvent(channel="staging", when="2026-11-23T10:00:00+00:00", what="refused", who="eve", why="it is <bad>"),
    ),
    promotions=(
        Promotion(
            channel="production",
            verdict="passed",
            who="ann",
            why="better",
            approval=Answer(approve=True, who="bob", why="seen"),
            checks=(
                Check(name="rebuild", message="target 'native' is the same when built again: mod.so", passed=True),
                Check(name="whole", message="every blob is there", passed=True),
                Check(name="max_ratio_current", message="it is faster", passed=True, value=0.875, bound=1.02)
                .model_copy(update={"interval": Interval(low=0.8125, high=0.9375)}),
            ),
            run="f" * 32,
            signer=None,
        ),
    ),
    faults=("The registry does not answer.",),
)  # fmt: skip


def test_the_section_on_trust_says_what_has_become_of_the_release(page: str) -> None:
    assert "signature</th>" in page
    assert "No promotion known here built it again" in page
    assert "tvmflow verify BUNDLE --rebuild RELEASE_FILE" in page
    release = _release("3", 2.5, onnx="b")
    text = update_page(page, release, _STANDING)
    section = text.partition('<h2 id="trust">')[2].partition("</section>")[0]
    for sentence in (
        "the release is signed with abababababababab (not checked: no key is trusted here)",
        "<li>target &#x27;native&#x27; is the same when built again: mod.so</li>",
        "it is &lt;bad&gt;",
        "passed; asked for by ann (better); approved by bob (seen)",
        "<li>kept: every blob is there</li>",
        '<data value="0.8125">0.812</data> to <data value="0.9375">0.938</data>',
        "The registry does not answer.",
    ):
        assert sentence in section
    assert "No promotion known here built it again" not in section
    assert data_of(text)["standing"] == _STANDING.model_dump(mode="json")
    assert unexplained_figures(text) == []
    # All else stays as it was, and the section can be written again.
    assert text.partition('<h2 id="trust">')[0] == page.partition('<h2 id="trust">')[0]
    assert text.count("</section>") == page.count("</section>")
    assert update_page(text, release, _STANDING) == text
    assert update_page("<p>another page</p>", release, _STANDING) == "<p>another page</p>"
    alone = _STANDING.model_copy(update={"promotions": (), "events": (), "signer": None, "faults": ()})
    section = update_page(page, release, alone).partition('<h2 id="trust">')[2]
    assert "No channel has held it or refused it." in section
    assert "the release is not signed." in section
    assert "No promotion known here built it again" in section


def test_the_page_loads_nothing(page: str) -> None:
    assert re.findall(r'(?:src|href)="(?!data:|#)', page) == []
    assert re.findall(r"(?:src|href)=[^\"]", page) == []
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_answers_why_it_is_slower(page: str) -> None:
    changes = {change["name"]: change for change in data_of(page)["changes"]}
    assert changes["p50 latency, ms"]["ratio"] == 1.25
    assert changes["task metric"]["ratio"] == 1.0
    assert "sha256:bbbbbbbbbbbb…" in page
    assert "operator set" not in page.partition("What differs")[2].partition("Trust")[0]


def test_a_slower_machine_shows_by_its_processor_and_the_reference_kernel() -> None:
    now = make_compared("2", 1.0, reference=150e-6, processor="processor 2")
    before = make_compared("1", 1.0, reference=100e-6, processor="processor 1")
    changes = {change.name: change for change in compare_releases(now, before)}
    assert changes["reference kernel, us"].ratio == pytest.approx(1.5)
    assert changes["reference kernel, us"].now == pytest.approx(150)
    assert (changes["processor"].before, changes["processor"].now) == ("processor 1", "processor 2")
    assert changes["threads"].now == "2"
    text = write_page(make_data(now, "production", before, (before,), {}, ()))
    assert "<td>processor 1</td><td>processor 2</td>" in text
    assert unexplained_figures(text) == []


@pytest.mark.parametrize(
    ("reference", "peer", "onnx", "conclusion"),
    [
        (1.3, 1.3, "a", "The machine was slower"),
        (1.3, 1.0, "b", "The machine was slower"),
        (1.0, 1.28, "a", "Other work held the processors"),
        (1.0, 1.28, "b", "The model, which is another one, or other work on the machine explains it"),
        (1.0, 1.05, "b", "The machine does not explain it"),
        (1.0, 1.0, "a", "The machine does not explain it"),
        (1.04, 1.05, "a", "The machine does not explain it"),
    ],
)
@pytest.mark.parametrize("rounds", [3, 25])
def test_the_page_says_whether_the_machine_or_the_build_is_slower(
    reference: float, peer: float, onnx: str, conclusion: str, rounds: int
) -> None:
    before = make_compared("1", 1.0, rounds=rounds, provenance=Provenance(onnx="sha256:" + "a" * 64, opset=18))
    provenance = Provenance(onnx="sha256:" + onnx * 64, opset=18)
    now = make_compared("2", 1.3, reference=reference, peer=peer, rounds=rounds, provenance=provenance)
    text = write_page(make_data(now, "production", before, (before,), {}, ()))
    sentence = re.findall(r'<p class="verdict undecided">(native takes \d.*?)</p>', text)
    verdict = text.partition('<h2 id="verdict">')[2].partition("</section>")[0]
    assert "native takes 1.30 times as long as in 1, which production holds." in re.sub("<[^>]*>", "", verdict)
    assert sentence == [
        f"native takes 1.30 times as long as in 1. {conclusion}: the reference kernel, which is the same for every "
        f"release, took {reference:.2f} times as long, and with "
        f"{'the same model' if onnx == 'a' else 'this release&#x27;s model, which is another one'}, "
        f"onnxruntime {peer:.2f} times."
    ]
    assert data_of(text)["slowdowns"][0]["bundle"] == pytest.approx(1.3)
    assert sentence[0] in write_difference(now, before)


@pytest.mark.parametrize(
    ("changes", "peer", "onnx", "conclusion"),
    [
        (
            {"threads": (2, 2)},
            1.3,
            "a",
            "It was measured on other terms (threads of the peers 1 to 2), which explains it",
        ),
        (
            {"threads": (1, 1)},
            1.3,
            "a",
            "Other work held the processors, and it was measured on other terms (threads 2 to 1)",
        ),
        (
            {"threads": (1, 2), "processor": "slow"},
            1.3,
            "a",
            "It was measured on other terms (processor processor to slow, threads 2 to 1, threads of the peers 1 to "
            "2), which explains it",
        ),
        (
            {"threads": (1, 1)},
            1.0,
            "a",
            "The machine does not explain it, and it was measured on other terms (threads 2 to 1)",
        ),
        (
            {"threads": (1, 1)},
            1.3,
            "b",
            "The model, which is another one, or other work on the machine explains it, and it was measured on other "
            "terms (threads 2 to 1)",
        ),
    ],
)
def test_a_slowdown_by_fewer_threads_or_another_processor_is_not_that_of_other_work(
    changes: dict[str, Any], peer: float, onnx: str, conclusion: str
) -> None:
    before = make_compared("1", 1.0, provenance=Provenance(onnx="sha256:" + "a" * 64, opset=18))
    provenance = Provenance(onnx="sha256:" + onnx * 64, opset=18)
    (slowdown,) = find_slowdowns(make_compared("2", 1.3, peer=peer, provenance=provenance, **changes), before)
    assert f"native takes 1.30 times as long as in 1. {conclusion}: the reference kernel" in str(slowdown)


@pytest.mark.parametrize(
    ("rounds", "cell"),
    [(3, "-, rounds missing: 5"), (7, "-, rounds missing: 1"), (8, "{0} to {0}"), (25, "{0} to {0}")],
)
def test_the_ratio_to_a_peer_has_its_interval_or_the_rounds_that_it_lacks(rounds: int, cell: str) -> None:
    now, before = make_compared("2", 1.3, rounds=rounds), make_compared("1", 1.0, rounds=rounds)
    text = write_page(make_data(now, "production", before, (before,), {}, ()))
    (table,) = re.findall(r"<caption>Latency over a peer&#x27;s, measured in turn, native</caption>.*?</table>", text)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]]
    shown = [[re.sub("<[^>]*>", "", value) for value in row] for row in rows]
    ratios = {"1": "1.000", "2": "1.300"}
    assert shown == [
        ["onnxruntime", version, ratio, cell.format(ratio), str(rounds)] for version, ratio in ratios.items()
    ]
    assert unexplained_figures(text) == []


def test_a_gate_on_a_figure_shows_the_interval_of_its_check() -> None:
    interval = {"interval": Interval(low=-0.0125, high=0.0375)}
    checks = (_CHECK.model_copy(update=interval), _CHECK.model_copy(update={**interval, "name": "max_ratio_current"}))
    text = write_page(make_data(_release("1", 1.0), "production", None, (), {}, (*checks, _CHECK)))
    shown = '<data value="-0.0125">-0.013</data> to <data value="0.0375">0.037</data>'
    rows = re.findall(r'<tr><th scope="row">max_(?:metric_drop|ratio_current)</th>.*?</tr>', text)
    # The figure of the first is a metric, and its interval that of the drop.
    assert [re.findall(r"<td[^>]*>(.*?)</td>", row)[-1] for row in rows] == [f"a drop of {shown}", shown, "-"]
    assert unexplained_figures(text) == []


@pytest.mark.parametrize(
    ("noise", "unevenness", "sentence"),
    [
        (0.125, 0.03125, ""),
        (0.125, 0.25, "by 12.5%, and a fixed kernel's times by 25.0%"),
        (0.25, 0.03125, "by 25.0%, and a fixed kernel's times by 3.1%"),
    ],
)
def test_the_page_says_that_the_machine_was_busy(noise: float, unevenness: float, sentence: str) -> None:
    release = make_compared("1", 1.0, rounds=21)
    measurements = release.targets[0].measurements
    assert measurements is not None
    comparison = measurements.comparisons["onnxruntime"]
    # One round in twenty is far slower, which is no sign of a busy machine.
    slow = [0.0] * 17 + [1.0] * 3
    pairs = (
        pair.model_copy(update={"candidate": 1.0 + noise * share, "reference": 1.0 + unevenness * share})
        for pair, share in zip(comparison.pairs, [*slow, 32.0], strict=True)
    )
    comparisons = {"onnxruntime": comparison.model_copy(update={"pairs": tuple(pairs)})}
    measurements = measurements.model_copy(update={"comparisons": comparisons})
    busyness = measurements.describe_busyness()
    assert measurements.is_busy is (busyness is not None) is (sentence != "")
    release = make_release("net", "1", make_target(measurements=measurements))
    text = write_page(make_data(release, "production", None, (), {}, ()))
    verdict = text.partition('<h2 id="verdict">')[2].partition("</section>")[0]
    plain = re.sub("<[^>]*>", "", html.unescape(verdict))
    assert ("the machine was busy while it was measured" in plain) is (sentence != "")
    assert sentence in plain
    assert data_of(text)["quietness"]["native"]["busyness"] == busyness
    assert unexplained_figures(text) == []


def test_the_page_says_that_the_comparison_proves_little() -> None:
    verdict = make_verdict(0.9).model_copy(update={"notes": ("the comparison proves little: 'y' is 0",)})
    release = make_release("net", "1", make_target(verdict=verdict))
    text = write_page(make_data(release, "production", None, (), {}, ()))
    section = html.unescape(text.partition('<h2 id="verdict">')[2].partition("</section>")[0])
    assert "native: the comparison proves little: 'y' is 0" in section
    assert unexplained_figures(text) == []


def test_a_percentile_that_is_not_shown_lacks_runs(page: str) -> None:
    assert data_of(page)["quietness"]["native"]["missing"] == {"p99": 662 - 64}
    assert "64 runs in rounds; slow rounds differ from fast ones by 0.0%; p99 needs 598 runs more" in re.sub(
        "<[^>]*>", "", page
    )


def test_a_long_name_keeps_its_end() -> None:
    names = [f"model.encoder.layers.{index}.attention.self.projection" for index in range(2)]
    rows = [charts.GraphRow(name, "", (), 1.0, None) for name in names]
    shown = re.findall(r"<text [^>]*>([^<]*…[^<]*)<", charts.graph("layers", rows))
    assert [name.partition("…")[2] in names[index] for index, name in enumerate(shown)] == [True, True]
    assert shown[0] != shown[1]
    assert all(name.endswith(".self.projection") for name in shown)


def test_a_table_of_nothing_says_so() -> None:
    assert table("Drifts", ("model", "figure"), []) == "<p>Drifts: none.</p>"


def test_the_first_release_has_its_figures() -> None:
    text = write_page(make_data(_release("1", 1.25), "production", None, (), {}, ()))
    figure = re.findall(r'<th scope="row">p50 latency, ms</th><td[^>]*>(.*?)</td></tr>', text)
    assert figure == ['<data value="1.25">1.25</data>']
    assert unexplained_figures(text) == []


def test_the_sum_of_a_profile_stands_beside_the_median_of_a_run(page: str) -> None:
    assert data_of(page)["profiles"]["native"] == {"ms": 4.0, "calls": 3, "p50": 2.5}
    plain = re.sub("<[^>]*>", "", page)
    assert "native: these 3 calls take 4.0000 ms together, while a run takes 2.5000 ms (p50)" in plain
    unmeasured = make_release("net", "1", make_target())
    text = write_page(make_data(unmeasured, "production", None, (), {"native": _INSIGHT}, ()))
    assert "calls take <data" in text
    assert "(p50)" not in text


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        ("1f" * 32, "1f1f1f1f1f1f…"),
        ("sha256:" + "1f" * 32, "sha256:1f1f1f1f1f1f…"),
        ("s3://bucket/" + "a" * 80, "s3://bucket/" + "a" * 80),
        ("g" * 64, "g" * 64),
        ("1f" * 33, "1f" * 33),
        (7, "7"),
    ],
)
def test_only_a_digest_is_cut(fact: object, text: str) -> None:
    assert shorten(fact) == text


@pytest.mark.parametrize("bundle", [1.0, 0.8, 1.005])
def test_a_release_that_is_as_fast_needs_no_explanation(bundle: float) -> None:
    now, before = make_compared("2", bundle, reference=1.3), make_compared("1", 1.0)
    assert list(find_slowdowns(now, before)) == []


def test_a_release_without_measurements_is_not_slower() -> None:
    unmeasured = make_release("net", "3", make_target())
    for now, before in ((unmeasured, make_compared("1", 1.0)), (make_compared("2", 1.3), unmeasured)):
        assert list(find_slowdowns(now, before)) == []


def test_the_page_names_the_layers_that_lost_most(page: str) -> None:
    rows = {row["name"]: row["difference"] for row in data_of(page)["slower"]["native"]}
    assert rows["stage0.block0.conv0"] == 0.05 - 0.0125
    assert rows["stage9.gone"] == -0.5
    (table,) = re.findall(r"<caption>native: the layers that lost most since 2</caption>.*?</table>", page)
    assert re.search('<th scope="row">([^<]*)</th>', table)[1] == next(iter(rows))  # type: ignore[index]
    assert list(rows.values()) == sorted(rows.values(), reverse=True)


def test_a_layer_is_judged_by_the_level_that_holds_its_bytes() -> None:
    insight = _INSIGHT.model_copy(
        update={
            "layers": (
                _layer(0, ms=1.0, gflop=0.001, megabytes=2.0),
                _layer(1, ms=1.0, gflop=0.001, megabytes=8.0),
                _layer(2, ms=1.0, gflop=0.1, megabytes=0.001),
                _layer(3, ms=1.0, gflop=0.0),
            )
        }
    )
    shares = [row.of_roof for row in layer_rows(insight)]
    # 2 MB in a cache of 140.25 GB/s, 8 MB in the memory of 28.75 GB/s, and arithmetic at 384.5 GFLOP/s.
    assert shares[:3] == pytest.approx([2 / 140.25, 8 / 28.75, 100 / 384.5])
    assert shares[3] is None


def test_the_page_of_a_large_network_is_small_and_readable(page: str) -> None:
    assert len(page.encode()) < 500_000
    graph = page.partition("their error relative to the largest value</figcaption>")[2].partition("</svg>")[0]
    assert graph.count("<circle") == 200
    assert "stage3.block99.conv1" in graph
    assert page.count("<caption>native: layers</caption>") == 1


def test_a_model_without_one_answer_has_no_samples_with_another(page: str) -> None:
    assert '<data value="1">1</data> of <data value="360">360</data> samples have another answer' in page
    sample = _sample(7, 3, image=_PNG).model_copy(update={"answer": None, "original_answer": None})
    insight = _INSIGHT.model_copy(update={"worst": (sample,), "flipped": (), "flips": 0})
    text = write_page(make_data(_release("1", 1.0), "production", None, (), {"native": insight}, ()))
    assert "have another answer" not in text
    assert "samples were compared with the original; this model gives no single answer" in text
    assert unexplained_figures(text) == []


def test_the_layers_of_a_page_are_read_again(page: str) -> None:
    times = times_of(read_data(page))
    assert times["native"]["stage0.block0.conv0"] == 0.05
    assert len(times["native"]) == 200
    assert times_of(read_data("<html>")) == {}


def test_the_page_names_all_that_the_channels_ask_for() -> None:
    gates = ChannelGates(max_metric_drop=0.01, max_latency_ms=2.5)
    strict = Policy(after="staging", approval="another", signature="required", rebuild="required", gates=gates)
    release = make_release("net", "1", make_target(), channels={"staging": Policy(), "production": strict})
    text = write_page(make_data(release, "production", None, (), {}, ()))
    (rules,) = re.findall(r"only when its policy is kept:</p><ul>(.*?)</ul>", text)
    assert re.findall("<li>(.*?)</li>", rules) == [
        f"production: {rule}"
        for rule in (
            "after staging",
            "approval another",
            "signature required",
            "rebuild required",
            "max_latency_ms 2.5",
            "max_metric_drop 0.01",
        )
    ]


def test_a_refusal_stands_first() -> None:
    refused = _release("1", 1.0, reasons=("target 'native': it is <wrong>",))
    text = write_page(make_data(refused, "production", None, (), {}, ()))
    assert "Refused: target &#x27;native&#x27;: it is &lt;wrong&gt;" in text
    assert "production holds nothing" in text


def test_a_gate_that_is_not_kept_stands_first() -> None:
    checks = (_CHECK.model_copy(update={"passed": False}), _CHECK)
    text = write_page(make_data(_release("1", 1.0), "production", None, (), {}, checks))
    assert "production would refuse it: it has dropped</p>" in text
    assert unexplained_figures(text) == []


def test_text_of_a_model_cannot_end_the_data() -> None:
    origin = Provenance(onnx="sha256:" + "a" * 64, opset=18, source="</script><b>")
    release = _release("1", 1.0).model_copy(update={"provenance": origin})
    text = write_page(make_data(release, "production", None, (), {}, ()))
    assert text.count("</script>") == 1
    assert data_of(text)["release"]["provenance"]["source"] == "</script><b>"


def test_a_target_that_was_not_measured_has_no_figures() -> None:
    verdict = make_verdict().model_copy(update={"verified": False, "comparisons": ()})
    release = make_release("net", "1", make_target(verdict=verdict))
    text = write_page(make_data(release, "production", None, (), {}, ()))
    assert unexplained_figures(text) == []
    assert "not run on the machine that built it" in text


def test_a_figure_without_one_before_has_no_ratio() -> None:
    before = make_release("net", "1", make_target("other", measurements=make_measurements(1.0)))
    ratios = {change.name: change.ratio for change in compare_releases(_release("2", 2.0), before)}
    assert set(ratios.values()) == {None}
    assert unexplained_figures(write_difference(_release("2", 2.0), _release("1", 1.0))) == []


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((1, 8, 8), "image"),
        ((3, 32, 24), "image"),
        ((1, 3, 32, 24), "image"),
        ((32, 24, 3), "image"),
        ((1, 4000), "wave"),
        ((10,), "values"),
        ((5, 7, 9, 11), "values"),
    ],
)
def test_an_input_is_drawn_by_its_shape(shape: tuple[int, ...], kind: str) -> None:
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    drawing = draw("x", array)
    assert (drawing.image is not None, drawing.wave is not None) == (kind == "image", kind == "wave")
    assert drawing.values.startswith(f"{array.flat[0]:.4g}, ")


def test_a_sample_is_shown_as_the_text_of_the_user_s_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "show = lambda inputs: ' '.join('<%d>' % x for x in inputs['ids'])\n"
    words += "number = lambda inputs: 1\nbroken = lambda inputs: inputs['nix']\nends = lambda inputs: exit(0)\n"
    words += "half = lambda inputs: chr(0xD800)\ndef changes(inputs): inputs['ids'][:] = 9; return ''\n"
    (tmp_path / "words_of_a_report.py").write_text(words)
    monkeypatch.syspath_prepend(str(tmp_path))

    def shown(function: str, count: int = 3) -> Text:
        return write_text(f"words_of_a_report:{function}", {"ids": np.arange(count)})

    texts = [shown(name) for name in ("show", "half", "number", "broken", "gone", "ends")]
    failure = "function that shows a sample 'words_of_a_report:{}' {}".format
    assert [(text.text, text.failed) for text in texts] == [
        ("<0> <1> <2>", False),
        ("?", False),
        (failure("number", "returned a int, not a text"), True),
        (failure("broken", "raised KeyError"), True),
        (failure("gone", "").rstrip() + ": module 'words_of_a_report' has no 'gone'", True),
        (failure("ends", "raised SystemExit"), True),
    ]
    long = shown("show", 1000).text
    assert (len(long), long[-1]) == (2001, "…")
    ids = np.arange(3)
    write_text("words_of_a_report:changes", {"ids": ids})
    assert ids.tolist() == [0, 1, 2]
    sample = _sample(7, 3).model_copy(update={"text": texts[0].text})
    insight = _INSIGHT.model_copy(update={"worst": (sample,), "flipped": ()})
    text = write_page(make_data(_release("1", 1.0), "production", None, (), {"native": insight}, ()))
    assert "<blockquote>&lt;0&gt; &lt;1&gt; &lt;2&gt;</blockquote>" in text
    assert "<details><summary>inputs</summary><p><code>x: 1, 2, 3</code></p></details><figcaption>sample" in text


def test_the_page_says_why_no_sample_is_shown_as_text() -> None:
    insight = _INSIGHT.model_copy(update={"problem": "The samples are not shown as text: it <ended>."})
    text = write_page(make_data(_release("1", 1.0), "production", None, (), {"native": insight}, ()))
    section = text.partition('<h2 id="worst-samples">')[2].partition("</section>")[0]
    assert '<p class="verdict undecided">The samples are not shown as text: it &lt;ended&gt;.</p>' in section


def test_token_ids_are_shown_as_numbers() -> None:
    assert draw("ids", np.arange(100, dtype=np.int64)).values.startswith("0, 1, 2, 3")


def _contrast(first: str, second: str) -> float:
    """The contrast of two colours, 1 to 21, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", charts.COLOURS)
def test_a_colour_is_seen_on_both_pages_and_carries_white_text(colour: str) -> None:
    # #121212 is a browser's page in the dark theme.
    assert min(_contrast(colour, "#ffffff"), _contrast(colour, "#121212")) >= 3
    assert _contrast(colour, "#ffffff") >= 4.5


def test_axes_have_round_numbers_and_releases_whole_ones() -> None:
    chart = charts.points("latency", "release", "p50, ms", {"native": [(57.0, 1.25), (58.0, 30.4)]}, is_count=True)
    assert re.findall(r'class="tick"[^>]*>([^<]*)<', chart) == ["0", "10", "20", "30", "57", "58"]
    chart = charts.points("accuracy", "p50, ms", "metric", {"native": [(3.3, 0.99)]})
    assert re.findall(r'class="tick"[^>]*>([^<]*)<', chart) == ["0", "0.5", "1", "0", "1", "2", "3"]


def test_names_of_points_that_are_close_stand_below_each_other() -> None:
    chart = charts.points("accuracy", "p50, ms", "metric", {name: [(3.0, 1.0)] for name in ("one", "two", "three")})
    lines = [float(y) for y in re.findall(r'<text x="[^"]*" y="([^"]*)" text-anchor="end">(?:one|two|three)<', chart)]
    assert [second - first for first, second in itertools.pairwise(lines)] == [13.0, 13.0]


def test_a_long_number_is_in_full_and_a_table_names_its_rows_and_columns() -> None:
    written = table("Sizes", ("what", "note", "bytes"), [("bundle", "-", number(2_412_345.0)), ("more", "x", "-")])
    assert (
        '<th scope="row">bundle</th><td>-</td><td class="number"><data value="2412345.0">2,412,345</data></td>'
        in written
    )
    assert '<th scope="col">note</th><th scope="col" class="number">bytes</th>' in written
    assert [str(number(value)) for value in (None, 0.00012345)] == ["-", '<data value="0.00012345">0.0001234</data>']


def test_every_column_has_a_heading_and_everything_that_scrolls_a_name(page: str) -> None:
    assert re.findall(r"<th[^>]*></th>", page) == []
    stops = re.findall(r'<(?:div|pre)[^>]*tabindex="0"[^>]*>', page)
    assert stops
    assert all('role="region" aria-label="' in stop for stop in stops)
    # What may be wider than a phone scrolls by itself; a browser measures that below, where there is one.
    wide = page.count("<table>") + page.count('<svg class="chart" ')
    assert wide == len(re.findall(r'<div class="scroll"[^>]*>(?:<table>|<svg class="chart" )', page)) > 10
    # The keyboard goes through the page in its order.
    assert set(re.findall(r'tabindex="([^"]*)"', page)) == {"0"}
    drawings = re.findall(r"<svg[^>]*>(?:<title>([^<]*)</title>)?", page)
    pictures = re.findall(r'<img (?:alt="([^"]*)")?', page)
    assert len(drawings) == page.count("<svg") > 6
    assert all(drawings)
    assert pictures
    assert all(pictures)


def test_every_chart_of_the_page_is_a_picture(page: str) -> None:
    found = find_charts(page)
    assert len(found) == page.count("<figure><figcaption>") == 6
    for chart in found.values():
        picture = Image.open(io.BytesIO(draw_png(chart)))
        _, _, width, height = map(float, re.findall(r'viewBox="([^"]*)"', chart)[0].split())
        assert picture.size == (1280, pytest.approx(1280 * height / width, abs=1))
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
        assert (255, 255, 255) in colours
        assert len(colours) > 10


def test_a_picture_shows_text_and_is_the_same_each_time() -> None:
    first, second = (draw_png(charts.bars("times", {name: 1.5})) for name in ("conv", "pool"))
    assert first != second
    assert first == draw_png(charts.bars("times", {"conv": 1.5}))


def test_a_picture_of_a_very_tall_chart_is_no_taller_than_programs_show() -> None:
    picture = Image.open(io.BytesIO(draw_png(charts.bars("times", {str(index): 1.0 for index in range(200)}))))
    assert picture.height <= 16_384 < picture.height + 2


@pytest.mark.parametrize("rows", [{}, {"one": 0.0}])
def test_charts_of_nothing_are_charts(rows: dict[str, float]) -> None:
    assert charts.bars("nothing", rows).startswith("<svg")
    assert charts.points("nothing", "x", "y", {name: [(0.0, value)] for name, value in rows.items()}).startswith("<svg")


@needs("chromium")
def test_nothing_overflows_a_phone_or_a_desk(page: str, tmp_path: Path) -> None:
    assert measure_overflow(page, tmp_path) == [0, 0]


@needs("chromium")
def test_a_phone_shows_the_ratios_and_the_verdict_without_scrolling(page: str, tmp_path: Path) -> None:
    hidden = measure_hidden(page, tmp_path, 390)
    for caption in ("What was checked, native", "Figures, native", "Latency of the releases", "the slowest functions"):
        (pixels,) = (pixels for name, pixels in hidden.items() if name.endswith(caption))
        assert pixels == 0, caption


@pytest.mark.parametrize(
    ("latencies", "drifts"),
    [
        ([1.0, 1.01, 1.02, 1.03, 1.04, 1.05], True),
        ([1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 0.99, 1.01, 1.0], False),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 5.0], False),
        ([1.0, 1.02, 1.04, 1.06, 1.08], False),
        ([1.0, 1.01, 0.99, 1.0] * 3 + [1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07], True),
    ],
)
def test_small_steps_in_one_direction_are_a_drift(latencies: list[float], drifts: bool) -> None:
    releases = [_release(str(index), latency) for index, latency in enumerate(latencies, 1)]
    names = {drift.figure for drift in find_drifts(releases)}
    assert ("p50 latency, ms" in names) == drifts
    assert "task metric" not in names


def test_a_drift_in_words_has_both_ends() -> None:
    releases = [_release(str(index), 1 + index / 100) for index in range(1, 7)]
    (sentence,) = [str(drift) for drift in find_drifts(releases) if drift.figure == "p50 latency, ms"]
    assert sentence.startswith("native: p50 latency, ms rises over the last 6 releases, from 1.01 to 1.06 (")


_NOISE = (0.003, -0.001, 0.002, -0.004, 0.001, 0.004, -0.002, 0.0, -0.003, 0.002)


def _history(*levels: float) -> list[Release]:
    """Releases with a median latency around these, made on the first days of November."""
    noise = itertools.cycle(_NOISE)
    return [
        _release(str(index), level + next(noise)).model_copy(
            update={"created_at": f"2026-11-{index:02}T10:00:00+00:00"}
        )
        for index, level in enumerate(levels, 1)
    ]


@pytest.mark.parametrize(
    ("levels", "versions"),
    [
        ([1.0] * 12 + [1.1] * 3, ["13"]),
        ([1.0] * 9 + [1.1] * 7 + [1.02] * 8, ["10", "17"]),
        ([1.0] * 16, []),
        ([1.0] * 12 + [5.0], []),
        ([1.0, 1.0, 1.0, 1.1, 1.1, 1.1], []),
        ([1 + index / 50 for index in range(20)], []),
    ],
)
def test_a_step_names_its_release(levels: list[float], versions: list[str]) -> None:
    steps = [step for step in find_steps(_history(*levels)) if step.figure == "p50 latency, ms"]
    assert [step.version for step in steps] == versions
    for step, level in zip(steps, dict.fromkeys(levels), strict=False):
        assert step.before == pytest.approx(level, abs=0.004)
        assert step.when == f"2026-11-{int(step.version):02}T10:00:00+00:00"
        assert step.releases == len(levels) + 1 - int(step.version)


def test_the_page_says_at_which_release_a_figure_stepped() -> None:
    *history, release = _history(*[1.0] * 12, *[1.1] * 3)
    text = write_page(make_data(release, "production", None, history, {}, ()))
    assert "p50 latency, ms stepped from 1 to 1.1 at release 13 of 2026-11-13" in text
    steps = {step["figure"]: step["version"] for step in data_of(text)["steps"]}
    assert steps["p50 latency, ms"] == steps["runs per second"] == "13"
    assert "bundle, bytes" not in steps


def test_figures_that_only_vary_have_few_steps() -> None:
    generator = np.random.default_rng(0)
    found = [
        next(find_steps(_history(*generator.normal(1, 0.1, 12))), None) for _ in range(scale.count(normal=10, long=300))
    ]
    # The releases have three figures of time, which rise and fall together.
    assert sum(step is not None for step in found) <= 0.02 * len(found) + 3 * (0.02 * len(found)) ** 0.5
