"""Reward functions that behave badly in every way, named by import path in the tests."""

import asyncio
import os
import subprocess
import sys
import time


def good(sample, *, prompt, text, bonus=0.0):
    return len(text) + bonus


def returns(sample, *, prompt, text, what):
    return {"none": None, "nan": float("nan"), "infinite": float("-inf"), "string": "1.0", "list": [1.0, 0.0], "type": object()}[what]


def lengths_of_steps(sample, *, prompt, text, steps):
    return [len(step) for step in steps]


def wrong_steps(sample, *, prompt, text, steps, what):
    return {"number": 1.0, "short": [1.0] * (len(steps) - 1), "nan": [float("nan")] * len(steps)}[what]


def raises(sample, *, prompt, text):
    raise ZeroDivisionError("the grader is broken")


def hangs_on_x(sample, *, prompt, text):
    if text == "x":
        while True:
            time.sleep(60)
    return 1.0


def hangs_with_a_child(sample, *, prompt, text, pid_file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(pid_file, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def dies(sample, *, prompt, text):
    os._exit(7)


def prints(sample, *, prompt, text):
    print("to the standard output", flush=True)
    return 1.0


def pid(sample, *, prompt, text):
    return os.getpid()


async def slow_async(sample, *, prompt, text, seconds=0.0):
    await asyncio.sleep(seconds)
    return 2.0


finished = []


async def stubborn(sample, *, prompt, text):
    for _ in range(3):
        try:
            await asyncio.sleep(1.0)
        except asyncio.CancelledError:
            continue
    finished.append(text)
    return 1.0


async def raises_async(sample, *, prompt, text):
    raise ZeroDivisionError("the async grader is broken")


def fails_every_other(sample, *, prompt, text):
    return None if text == "x" else 1.0


def takes_no_prompt(sample, text):
    return 1.0


not_a_function = 3
