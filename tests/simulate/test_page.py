"""The calculator page in headless Chromium: every control, links, nonsense, pasted text, copying.

    pytest tests/simulate/test_page.py

Skips without playwright or a Chromium; calculator_visit.py says what is checked after every test.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = pytest.mark.slow

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
expect = api.expect
pytest_plugins = ("calculator_visit",)
FIGURES = ("best", "speedup", "rate", "each", "tokens", "point", "memory")
HOSTILE = '<img src=x onerror="document.title=`taken`"><script>document.title="taken"</script>'
LLAMA = (
    '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,'
    ' "intermediate_size": 14336, "vocab_size": 128256, "unread": 1}'
)
PIXELS = "() => [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL()).join()"
INK = """(place) => { const canvas = document.querySelector(`#${place} canvas`), c = canvas.getContext('2d');
    return new Set(new Uint32Array(c.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size; }"""


def test_it_opens_on_a_common_model_that_fits(visit: Any) -> None:
    """Also after Reset: a first screen that says "Does not fit" tells nobody what speculation brings."""
    tab = visit()
    expect(tab.page.locator("#say-common")).to_have_attribute("aria-pressed", "true")
    assert "paceline simulate --model Qwen3-8B --hardware H100" in tab.code("command")
    expect(tab.page.locator("#warnings li")).to_have_count(0)
    first = tab.shown()
    tab.page.locator("#say-opening").click()
    tab.page.locator("#reset").click()
    assert tab.shown() == first


def test_the_published_landmark_is_its_walk_through(visit: Any) -> None:
    tab = visit()
    tab.page.locator("#say-opening").click()
    assert (tab.figure("best"), round(tab.figure("speedup"), 2)) == (16, 2.98)
    seen = {kind: tab.page.locator(f"#best-{kind}") for kind in ("ideal", "autoregressive", "block", "yours")}
    assert {kind: each.text_content() for kind, each in seen.items()} == {
        "ideal": "5.74×",
        "autoregressive": "1.17×",
        "block": "2.98×",
        "yours": "–",
    }
    for each in seen.values():
        box = each.bounding_box()
        assert box["y"] + box["height"] < 300, "not on the first screen"
    expect(tab.page.locator("#length-chart .chosen")).to_have_text("in blocks of 16")
    for place in ("length-chart", "batch-chart", "time-chart"):
        assert tab.page.evaluate(INK, place) > 20, f"{place} is empty"
    assert "paceline simulate --model DeepSeek-V4-Pro --hardware B200" in tab.code("command")
    assert tab.page.locator("#limits li").count() >= 4
    expect(tab.page.locator("#warnings li")).to_contain_text("Take 8 × B200 or more")
    assert_each_chart_is_drawn_anew_and_emptied(tab)


def assert_each_chart_is_drawn_anew_and_emptied(tab: Any) -> None:
    drawn = "() => [...document.querySelectorAll('#panel-lengths .u-wrap canvas')].map((canvas) => canvas.toDataURL())"
    seen = [tab.page.evaluate(drawn)]
    for batch in ("2", "0"):
        tab.set("batch", batch)
        seen.append(tab.page.evaluate(drawn))
    assert all(len(set(pictures)) == 3 for pictures in zip(*seen, strict=True)) and len(seen[0]) == 3


MOE = "#model=DeepSeek-V4-Flash&hardware=B200&batch=8"
CURVE = "#model=DeepSeek-V4-Flash&batch=64&block.acceptance=curve&block.curve=0.8,0.7,0.8"
CHANGES = [
    ("", "model", "Qwen3-8B"),
    ("", "hardware", "H200"),
    ("", "gpus", "2"),
    ("", "weights", "bfloat16"),
    (MOE, "experts", "float8"),
    ("", "kv", "float32"),
    ("#batch=4096&context=1048576", "attention", "float8"),
    ("#context=1048576", "indexer", "bfloat16"),
    (MOE, "locality", "0.255"),
    ("#model=Qwen3.5-27B&hardware=RTX 4090&batch=64&max_draft=63&block.block=63&block.chance=1", "per_layer", True),
    ("", "batch", "9"),
    ("", "context", "100000"),
    ("", "max_draft", "9"),
    ("", "acceptance", "curve"),
    ("", "chance", "0.5"),
    (CURVE, "curve", "0.9, 0.6"),
    ("#block.acceptance=recorded", "recorded", "20, 10, 5"),
    ("", "drafter", "autoregressive"),
    ("", "overhead", "ms"),
    ("#overhead=ms", "overhead_ms", "9"),
    ("#overhead=rate", "plain_rate", "11"),
    ("", "cost", "params"),
    ("", "fraction", "0.3"),
    ("#block.cost=params", "params", "30"),
    ("", "block", "4"),
    ("#model=pasted", "config", LLAMA),
    ("#tab=tokens&batch=1", "measured", "published"),
    ("#tab=tokens&batch=1", "runs", '{"results": [{"batch": 1, "tokens_per_round": 3, "speedup": 2}]}'),
]
SLIDERS = [
    "overhead_ms",
    "plain_rate",
    "gpus",
    "locality",
    "batch",
    "context",
    "max_draft",
    "chance",
    "fraction",
    "params",
    "block",
]


MOVED = f"""const [link, name, value] = given, pixels = {PIXELS};
    await follow(link);
    const before = [shown(), pixels()];
    const control = document.getElementById(name === "drafter" ? `drafter-${{value}}` : name);
    if (control.type === "checkbox" || control.type === "radio") control.checked = true;
    else control.value = value;
    for (const type of ["input", "change"]) control.dispatchEvent(new Event(type, {{ bubbles: true }}));
    await new Promise((done) => setTimeout(done, 300));
    const isWrong = document.getElementById("fault").checkVisibility();
    return [shown() !== before[0], pixels() !== before[1], isWrong, location.hash];"""
"""Sets a control as a keyboard would, in one call; other tests of the page use keys and pointer."""


def test_every_control_moves_figures_and_charts(visit: Any) -> None:
    tab = visit()
    for link, name, value in CHANGES:
        moved = tab.script(MOVED, (link or "#batch=32").replace(" ", "%20"), name, value)
        assert moved[:3] == [True, True, False], name
        assert name in moved[3]


def test_no_control_is_left_out(visit: Any) -> None:
    tab = visit()
    names = tab.page.eval_on_selector_all("[data-field]", "(all) => all.map((each) => each.dataset.field)")
    assert {*names, "drafter"} == {name for _, name, _ in CHANGES} | {"method", "drafter_name"}
    numbers = tab.page.eval_on_selector_all("input[type=range]", "(all) => all.map((each) => each.id)")
    assert set(numbers) == {f"{name}-slider" for name in SLIDERS}
    unnamed = (
        "(all) => all.filter((one) => !(one.labels[0]?.textContent || one.getAttribute('aria-label'))).map((one) => "
        "one.id)"
    )
    assert tab.page.eval_on_selector_all("input, select, textarea", unnamed) == []


SLIDES = """const [link, name] = given;
    await follow(link);
    const slider = document.getElementById(`${name}-slider`), box = document.getElementById(name);
    const before = box.value, stood = shown();
    const slide = (most) => {
        if (most) slider.value = slider.max;
        else slider.stepUp();
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        return new Promise((done) => setTimeout(done));
    };
    await slide(false);
    if (shown() === stood) await slide(true);
    return [Number(box.value) > Number(before), shown() !== stood,
        slider.getAttribute("aria-valuetext").replaceAll(",", "") === box.value];"""
ELSEWHERE = {
    "params": "#block.cost=params",
    "block": "#block.block=4",
    "overhead_ms": "#overhead=ms",
    "plain_rate": "#model=Qwen3.5-27B&overhead=rate",
}


@pytest.mark.nightly
def test_every_slider_moves_its_number(visit: Any) -> None:
    tab = visit()
    for name in SLIDERS:
        assert tab.script(SLIDES, ELSEWHERE.get(name, "#batch=32"), name) == [True] * 3, name
    # one of them by keys
    tab.follow("#batch=32")
    slider, box = tab.page.locator("#chance-slider"), tab.page.locator("#chance")
    slider.focus()
    before, shown = box.input_value(), tab.shown()
    tab.page.keyboard.press("ArrowRight")
    assert float(box.input_value()) > float(before) and tab.shown() != shown
    box.fill(before)
    assert tab.shown() == shown


def test_method_and_drafter_reach_the_flags(visit: Any) -> None:
    tab = visit("#model=Qwen3-8B&hardware=H100")
    assert "dflash" in tab.code("vllm-flags") and "YOUR-DRAFTER" in tab.code("vllm-flags")
    tab.set("method", "ngram")
    assert '"method": "ngram"' in tab.code("vllm-flags") and "NGRAM" in tab.code("sglang-flags")
    tab.set("method", "eagle3")
    tab.set("drafter_name", "it's mine; rm -rf /")
    assert "--drafter ngram" not in tab.code("paceline-flags")
    assert "--speculative-draft-model-path 'it'\"'\"'s mine; rm -rf /'" in tab.code("sglang-flags")
    assert "method=eagle3" in tab.link()


MANY = (
    "#block.acceptance=recorded&block.recorded=5,3,9&block.cost=params&block.params=0.7&block.block=5"
    "&gpus=2&kv=float8&locality=0.3&per_layer=1"
)
VALUES = """() => [...document.querySelectorAll('input, select, textarea')]
    .map((each) => each.type === 'checkbox' ? each.checked : each.value)"""


def test_the_link_restores_everything(visit: Any) -> None:
    """In a page that opens with it, and in one that shows something else."""
    tab = visit(MANY)
    for link, is_opened in ((MANY, True), (CURVE, False), ("#batch=32", False)):
        tab.follow(link)
        tab.set("batch", "77")
        tab.set("model", "gpt-oss-120b")
        written, shown, command, values = tab.link(), tab.shown(), tab.code("command"), tab.page.evaluate(VALUES)
        if is_opened:
            tab.page.reload()
        else:
            tab.follow("#model=Qwen3-8B&batch=2&block.acceptance=curve&block.curve=0.5")
            assert tab.shown() != shown
            tab.follow(written)
        assert tab.shown() == shown and tab.code("command") == command, link
        assert tab.page.evaluate(VALUES) == values, link
        assert tab.link() == written, link


def test_a_link_typed_over_is_followed(visit: Any) -> None:
    tab = visit()
    tab.page.evaluate("location.hash = '#batch=1&model=Qwen3-8B&block.chance=0.6'")
    expect(tab.page.locator("#batch")).to_have_value("1")
    assert "Qwen3-8B" in tab.code("command")
    tab.page.get_by_role("button", name="Reset").click()
    expect(tab.page.locator("#batch")).to_have_value("8")
    # while the page writes its own
    tab.page.evaluate("location.hash = '#batch=1'; history.replaceState(null, '', '#batch=32')")
    expect(tab.page.locator("#batch")).to_have_value("1")
    expect(tab.page).to_have_url(re.compile("batch=1(&|$)"))


def test_a_pasted_config_travels_without_what_was_not_read(visit: Any) -> None:
    tab = visit("#model=pasted")
    expect(tab.page.locator("#fault")).to_contain_text("paste a model's config.json")
    tab.set("config", LLAMA)
    link = tab.link()
    assert "hidden_size" in link and "unread" not in link
    shown = tab.shown()
    tab.page.reload()
    assert tab.shown() == shown
    expect(tab.page.locator("#command-note")).to_be_visible()


WRONG = [
    ("batch", "1.5", "whole number from 1"),
    ("context", "", "whole number"),
    ("chance", "NaN", "from 0 to 1"),
    ("max_draft", "1e9", "from 1 to 64"),
]
"""Each kind of field; test_page_formulas.py has more that a link refuses."""


def test_nonsense_is_told_and_nothing_is_drawn(visit: Any) -> None:
    tab = visit()
    tab.set("batch", "7")
    tab.page.get_by_role("button", name="Reset").click()
    for name, value, message in WRONG:
        assert_told(tab, name, value, message)


def assert_told(tab: Any, name: str, value: str, message: str) -> None:
    shown, link = tab.shown(), tab.link()
    tab.set(name, value)
    expect(tab.page.locator("#fault")).to_contain_text(message)
    assert tab.page.locator(f"#{name}").get_attribute("aria-invalid") == "true"
    expect(tab.page.locator(f"#{name}-fault")).to_contain_text(message)
    assert {tab.page.locator(f"#{each}").text_content() for each in FIGURES} == {"–"}
    assert "NaN" not in tab.page.locator("body").inner_text() and tab.link() == link
    tab.page.get_by_role("button", name="Reset").click()
    assert tab.shown() == shown and tab.page.locator("[aria-invalid]").count() == 0


UNPREDICTABLE = [
    ("#model=pasted&config={", "not JSON"),
    ('#model=pasted&config={"hidden_size":4096}', "no num_hidden_layers"),
    ("#hardware=laptop%20CPU&gpus=2", "talk to each other"),
    ("#block.acceptance=recorded&block.recorded=nothing", "cannot be read"),
    ("#model=Qwen3.5-27B&overhead=rate&plain_rate=900", "without any overhead"),
]


def test_what_cannot_be_predicted_says_why(visit: Any) -> None:
    tab = visit()
    for link, message in UNPREDICTABLE:
        tab.follow(link)
        expect(tab.page.locator("#fault")).to_contain_text(message)
        assert {tab.page.locator(f"#{each}").text_content() for each in FIGURES} == {"–"}, link
    tab.follow("#batch=3")
    assert tab.page.locator("#fault").is_hidden()


def test_pasted_text_stays_text(visit: Any) -> None:
    shape = '{"dense":1e9,"attention":[{"kind":"gqa","layers":1}],"num_layers":1,"hidden_size":8,"max_context":9,"name":"NAME"}'
    tab = visit("#model=pasted&config=" + shape.replace("NAME", HOSTILE.replace('"', "'")).replace("#", "%23"))
    expect(tab.page.locator("#warnings")).to_contain_text("<img src=x")
    tab.set("drafter_name", HOSTILE)
    assert HOSTILE.replace("'", "") in tab.code("sglang-flags")
    tab.set("config", HOSTILE)
    expect(tab.page.locator("#fault")).to_contain_text("not JSON")
    assert tab.page.title() == "paceline calculator" and tab.page.locator("img").count() == 0
    refused = "(() => { try { document.body.innerHTML = '<b>'; return ''; } catch (error) { return error.name; } })()"
    assert tab.page.evaluate(refused) == "TypeError"
    tab.errors[:] = [error for error in tab.errors if "Trusted" not in error]


@pytest.mark.nightly
def test_the_link_and_the_commands_are_copied(visit: Any) -> None:
    tab = visit(permissions=("clipboard-read", "clipboard-write"))
    copied = []
    for button in tab.page.get_by_role("button", name="Copy").all():
        tab.page.evaluate("navigator.clipboard.writeText('nothing yet')")
        button.click()
        expect(tab.page.locator("#live")).to_have_text("Copied")
        copied.append(tab.page.evaluate("navigator.clipboard.readText()"))
        tab.rest()
    assert len(copied) == 5 and len({*copied}) == 3, "the link, the command, its flags"
    assert all(text.startswith(("file:", "# Does not fit: 844.0 GB", "paceline simulate")) for text in copied)
