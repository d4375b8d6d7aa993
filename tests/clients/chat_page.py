"""Drives the chat page of a running `host serve` in a headless Chromium: `pip install playwright`, a `chromium` on the
path, then `python3 tests/clients/chat_page.py http://127.0.0.1:8080 SCREENSHOT.png`."""

import shutil
import sys

from playwright.sync_api import expect, sync_playwright

base, screenshot = sys.argv[1:3]

with sync_playwright() as p:
    browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    outside, problems = [], []
    page.on("request", lambda r: outside.append(r.url) if not r.url.startswith(base) else None)
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.goto(base + "/")
    expect(page.locator("#model")).not_to_have_text("zinc")

    # A reply with a limit, by keyboard alone.
    page.locator("summary", has_text="Settings").click()
    page.fill("#max_tokens", "60")
    page.fill("#temperature", "0")
    page.locator("#max_tokens").dispatch_event("change")
    page.click("#input")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".turn .speed").last).to_contain_text("60 tokens", timeout=20_000)
    assert page.text_content(".turn:last-child .text"), "a reply"

    # A long one, stopped.
    page.fill("#max_tokens", "")
    page.fill("#temperature", "1.2")
    page.click("#input")
    page.keyboard.type("Tell me <b>more</b>")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator(".turn .text").last).not_to_be_empty()
    assert page.text_content("#send") == "Stop"
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_have_text("Send")
    assert page.locator(".turn.user b").count() == 0, "text is not markup"

    # How thoughts and code look, by the page's own functions.
    page.evaluate("""() => {
        const message = {role: "assistant", reasoning: "Hm.", content: "Like so:\\n```rust\\nfn main() {}\\n```\\nDone.", speed: ""};
        document.querySelector("#log").append(turn(message).box);
    }""")
    last = page.locator(".turn").last
    assert last.locator("pre").inner_text() == "fn main() {}" and last.locator(".text").inner_text().endswith("Done.")
    assert last.locator("details").get_attribute("open") is None, "thoughts are folded"
    page.screenshot(path=screenshot)

    # The conversation is still there after a reload; the page fits a phone.
    page.set_viewport_size({"width": 360, "height": 640})
    page.reload()
    expect(page.locator(".turn")).to_have_count(4)
    assert not page.locator("#side").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
    page.click("#menu")
    assert page.locator("#side").is_visible()
    page.mouse.click(350, 300)
    assert not page.locator("#side").is_visible()
    page.screenshot(path=screenshot.replace(".png", "-phone.png"))
    browser.close()
    assert not outside and not problems, (outside, problems)
print("ok")
