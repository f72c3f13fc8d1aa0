"""The page of a finished run in a real browser: what it shows, by mouse, by keyboard and to a screen reader."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from playwright.async_api import Locator, Page, Route, expect
from view_browser import open_page
from view_folder import HOSTILE, make_run

from headway.view.app import serve
from headway.view.folder import RunFolder

PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("root"))


@pytest.fixture
async def url(run: Path) -> AsyncIterator[str]:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(serve(RunFolder.at(run), 0, told.set_result))
    await asyncio.wait({told, serving}, return_when=asyncio.FIRST_COMPLETED)
    yield (await told).rstrip("/")
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


async def test_the_dashboard_of_a_finished_run(url: str) -> None:
    async with open_page() as page:
        await page.goto(url)
        await expect(page).to_have_title("test/view · Headway")
        await expect(page.get_by_text("finished run · step 30 of 30")).to_be_visible()
        reward = page.get_by_role("img", name="Reward by step. training: 0.850 at step 30. held-out: 0.800")
        await expect(reward).to_be_visible()
        await expect(
            page.get_by_role("img", name="Tokens by staleness, bound 2: 1200 at 0, 600 at 1, 60 at 3")
        ).to_be_visible()
        lane = page.get_by_role("img", name="engine/0: busy 50 %, waiting 38 %, updating weights 13 %")
        await expect(lane).to_be_visible()
        await expect(page.get_by_role("img", name="trainer: busy 75 %, waiting 25 %")).to_be_visible()
        await expect(
            page.get_by_role("img", name=re.compile("Samples a second.*if the trainer never waited: 40"))
        ).to_be_visible()
        await expect(page.get_by_text("0/7: no reward <b>in</b> 15 s")).to_be_visible()
        await expect(page.get_by_text("the reward takes 200 ms")).to_be_visible()
        await expect(page.get_by_role("row", name="0 serving v1.29 1 3")).to_be_visible()


async def test_a_chart_is_read_with_the_arrow_keys_and_as_a_table(url: str) -> None:
    async with open_page() as page:
        await page.goto(url)
        region = page.get_by_role("region", name="Reward", exact=True)
        await region.get_by_role("img").focus()
        await page.keyboard.press("Home")
        await expect(region.locator(".readout")).to_have_text("step 0 · held-out 0.200")
        await page.keyboard.press("End")
        await page.keyboard.press("ArrowLeft")
        await expect(region.locator(".readout")).to_have_text("step 29 · training 0.830")
        await page.keyboard.press("Escape")
        await expect(region.locator(".readout")).to_have_text("")
        await region.get_by_text("As a table").click()
        await expect(region.get_by_role("row", name="30 0.8500 0.8000")).to_be_visible()


async def test_a_lane_is_read_with_the_arrow_keys(url: str) -> None:
    async with open_page() as page:
        await page.goto(url)
        await page.get_by_role("img", name="engine/0").focus()
        await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("ArrowLeft")
        readout = page.get_by_role("region", name="Timeline").locator(".readout")
        await expect(readout).to_contain_text("engine/0 · updating, v1.2 · 5.00 s")


async def test_any_metric_can_be_chosen(url: str) -> None:
    async with open_page() as page:
        await page.goto(url)
        await page.get_by_role("combobox", name="Metric").select_option("timing/update")
        await expect(page.get_by_role("img", name="timing/update: 0.300 at step 30")).to_be_visible()


async def test_groups_are_sorted_filtered_and_paged(url: str) -> None:
    async with open_page() as page:
        await page.goto(url)
        await page.get_by_role("link", name="Trajectories").click()
        await expect(page.get_by_role("status").filter(has_text="90 groups, 50 shown")).to_be_visible()
        rows = page.locator("tbody tr")
        await expect(rows.first).to_contain_text("0/89")
        await page.get_by_role("button", name="Show more").click()
        await expect(rows).to_have_count(90)
        await expect(rows.nth(50).get_by_role("link")).to_be_focused()
        await page.get_by_role("button", name="Reward").click()
        await expect(page.get_by_role("columnheader", name="Reward")).to_have_attribute("aria-sort", "descending")
        await expect(rows.first).to_contain_text("0.500")
        await page.get_by_role("button", name="Reward").click()
        await expect(page.get_by_role("columnheader", name="Reward")).to_have_attribute("aria-sort", "ascending")
        await expect(rows.first).to_contain_text("0.000")
        await page.get_by_text("Ranges of reward").click()
        await page.get_by_role("spinbutton", name="Step, from").fill("28")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("status").filter(has_text="6 groups")).to_be_visible()
        assert "min_step=28" in page.url
        await page.reload()
        await expect(page.get_by_role("spinbutton", name="Step, from")).to_have_value("28")
        await expect(rows).to_have_count(6)


async def test_the_samples_of_a_group_stand_side_by_side_with_the_numbers_of_each_token(url: str) -> None:
    async with open_page() as page:
        await page.goto(f"{url}/#/groups?search=0/20")
        await page.get_by_role("link", name="0/20", exact=True).click()
        samples = page.get_by_role("article")
        await expect(samples).to_have_count(4)
        await expect(page.get_by_role("region", name="Prompt")).to_contain_text("sort")
        await expect(samples.first).to_contain_text("reward 0.000")
        tokens = samples.first.locator(".tokens")
        await expect(tokens).to_have_text("678901<eos>")
        await tokens.locator("span").nth(1).hover()
        await expect(fact(page, "version")).to_have_text("v5")
        await expect(fact(page, "log-prob")).to_have_text("-1.250 (29 %)")
        await expect(fact(page, "staleness")).to_have_text("1")
        await expect(fact(page, "advantage")).to_have_text("-1.000")
        await expect(fact(page, "divergence")).to_have_text("0.1250 (ratio 1.133)")
        await page.mouse.move(0, 0)
        await expect(page.get_by_text("Point at a token")).to_be_visible()
        await tokens.focus()
        for _ in range(4):
            await page.keyboard.press("ArrowRight")
        await expect(fact(page, "token")).to_have_text('"1"')
        await expect(fact(page, "version")).to_have_text("v6")
        await expect(tokens).to_have_attribute("aria-activedescendant", "t0-9")
        await page.keyboard.press("End")
        await expect(fact(page, "token")).to_have_text('"<eos>"')
        await page.get_by_role("radio", name="reward").check(force=True)
        await expect(samples.first).to_contain_text("reward 1.000")


def fact(page: Page, name: str) -> Locator:
    """What is said of the token that is looked at."""
    return page.locator(f'.about dt:text-is("{name}") + dd')


@pytest.mark.parametrize(("mode", "legend"), [("Version", "v5v6"), ("Log-prob", "certain, 0unlikely, -6 and below"),
                                              ("Advantage", "-1.0+1.0"), ("Divergence", "-0.13+0.13")])  # fmt: skip
async def test_tokens_are_coloured_by_each_number(url: str, mode: str, legend: str) -> None:
    async with open_page() as page:
        await page.goto(f"{url}/#/group/0%2F20")
        await expect(page.get_by_role("article")).to_have_count(4)
        await page.get_by_role("radio", name=mode).check(force=True)
        await expect(page.locator(".tools > div")).to_have_text(legend)
        colours = await page.locator(".sample .tokens span").evaluate_all(
            "spans => spans.map((one) => one.style.background)"
        )
        assert all(colours)
        assert len(set(colours)) > 1 or mode == "Divergence"


async def test_what_a_model_wrote_is_text_and_never_markup(url: str) -> None:
    async with open_page() as page:
        await page.goto(f"{url}/#/group/0%2F0")
        await expect(page.get_by_role("article").first.locator(".tokens")).to_have_text(
            HOSTILE.replace("\n", "↵\n") + "<eos>"
        )
        assert await page.locator("main img, main b").count() == 0


async def test_the_page_runs_no_other_script_and_asks_no_other_host(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for path in ("/", "/static/app.js", "/static/style.css"):
            async with http.get(f"{url}{path}") as reply:
                policy = reply.headers["Content-Security-Policy"]
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
                text = await reply.text()
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "innerHTML" not in text
            assert not re.search(r"(src|href)=\"(https?:)?//", text)


async def test_another_host_name_is_refused(url: str) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/groups", headers={"Host": "evil.example"}) as reply:
        assert reply.status == 400


@pytest.mark.parametrize("path", ["/", "/#/groups", "/#/group/0%2F20"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_nothing_is_wider_than_a_phone(url: str, path: str, scheme: str) -> None:
    async with open_page(viewport=PHONE, color_scheme=scheme) as page:
        await page.goto(f"{url}{path}")
        await expect(page.get_by_text("finished run")).to_be_visible()
        await expect(page.locator("path.curve, tbody tr, article").first).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("path", ["/", "/#/groups", "/#/group/0%2F20"])
async def test_everything_that_can_be_used_has_a_name_and_can_be_reached_by_tab(url: str, path: str) -> None:
    async with open_page() as page:
        await page.goto(f"{url}{path}")
        await expect(page.locator("path.curve, tbody tr, article").first).to_be_visible()
        assert await page.evaluate(NAMELESS) == []
        for role in ("banner", "navigation", "main"):
            await expect(page.get_by_role(role)).to_have_count(1)
        await expect(page.get_by_role("heading", level=1)).to_have_text("test/view")
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("main")).to_be_focused()
        assert await page.evaluate(OUT_OF_ORDER) == []


NAMELESS = """() => [...document.querySelectorAll('button, input, select, a, svg[role], [tabindex="0"]')]
    .filter((one) => one.checkVisibility() && !one.closest('dialog'))
    .filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length))
    .map((one) => one.outerHTML.slice(0, 200))"""
OUT_OF_ORDER = "() => [...document.querySelectorAll('[tabindex]')].filter((one) => one.tabIndex > 0).map(String)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_stands_out_from_its_ground(url: str, scheme: str) -> None:
    async with open_page(color_scheme=scheme) as page:
        for path in ("/", "/#/groups", "/#/group/0%2F20"):
            await page.goto(f"{url}{path}")
            await expect(page.locator("path.curve, tbody tr, article").first).to_be_visible()
            assert await page.evaluate(FAINT) == []


FAINT = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const numbers = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const ground = (one) => {
    const [r, g, b, a] = numbers(getComputedStyle(one).backgroundColor);
    if (a === 1 || !one.parentElement) return [r, g, b];
    return ground(one.parentElement).map((under, i) => under * (1 - a) + [r, g, b][i] * a);
  };
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const isText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const apart = 'dialog, option, svg, .hidden, .skip, :disabled, label:has(:disabled)';
  return [...document.querySelectorAll('body *')]
    .filter((one) => isText(one) && one.checkVisibility() && !one.closest(apart))
    .filter((one) => contrast(numbers(getComputedStyle(one).color), ground(one)) < 4.5)
    .map((one) => `${one.tagName}.${one.className}: ${one.textContent.slice(0, 40)} on ${ground(one)}`);
}"""
"""Texts whose contrast is below 4.5, as WCAG measures it."""


async def test_a_server_that_wants_a_token_gets_it_once(url: str) -> None:
    async def guarded(route: Route) -> None:
        if await route.request.header_value("authorization") == "Bearer right":
            await route.continue_()
        else:
            await route.fulfill(status=401, json={"detail": "the token is missing"})

    async with open_page(expects=["401"]) as page:
        await page.route("**/v1/**", guarded)
        await page.goto(url)
        dialog = page.get_by_role("dialog", name="Token")
        await dialog.get_by_label("Token", exact=True).fill("wrong")
        await dialog.get_by_role("button", name="Open").click()
        await expect(dialog.get_by_role("alert")).to_have_text("This is not the token.")
        await dialog.get_by_label("Token", exact=True).fill("right")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("finished run")).to_be_visible()
        await page.reload()
        await expect(page.get_by_text("finished run")).to_be_visible()
        await expect(dialog).not_to_be_visible()


async def test_the_theme_can_be_chosen_and_stays(url: str) -> None:
    async with open_page(color_scheme="light") as page:
        await page.goto(url)
        ground = "getComputedStyle(document.body).backgroundColor"
        light = await page.evaluate(ground)
        for name in ("light", "dark"):
            await page.get_by_role("button", name="Theme").click()
            await expect(page.get_by_role("button", name=f"Theme: {name}")).to_be_visible()
        assert await page.evaluate(ground) != light
        await page.reload()
        await expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()


async def test_a_run_without_dumps_says_what_to_set(tmp_path: Path) -> None:
    run = tmp_path / "run/me/test/view"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("rollout: {dump_to_file: false}\n")
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(serve(RunFolder.at(run), 0, told.set_result))
    async with open_page() as page:
        await page.goto(f"{await told}#/groups")
        await expect(page.get_by_text("Set rollout.dump_to_file: true")).to_be_visible()
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
