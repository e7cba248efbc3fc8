"""Twenty invented customers of one model: each has its own policies, and its own form of answers.

A customer's chats begin with its policies and worked examples; the user message is a request with the policy that
applies. Held-out requests have names, cities, products and remarks of their own (recipes/support_tickets.py). Seeded:
the same customers and requests each time.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.hub import resolve
from paceline.model.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from support_tickets import HELDOUT, TRAIN, Message, Words, words  # pyright: ignore[reportMissingImports]

NUM_CUSTOMERS = 20
LARGE = (0, 4, 8, 12, 16)
"""Customers with much traffic."""
CASES = words("""was damaged|has the wrong size|was not delivered|stopped working|is not wanted|was charged twice
    is too loud|has missing parts|has a new address|is a gift|needs an invoice|arrived late|has a scratch
    is out of stock|lost its label|needs a manual|was opened before|has the wrong colour|came without a key
    smells of smoke""")
ACTIONS = words("""refund|exchange|trace|repair|cancel|credit|replace|resend|redirect|wrap|invoice|discount|polish
    reorder|relabel|print|inspect|recolour|unlock|clean""")
"""Action for each of CASES."""
NUM_CASES = 6
"""Policies of one customer."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a customer's service: sender, product, case, and the policy that applies."""

    name: str
    city: str
    product: str
    case: str
    policy: str
    action: str
    remark: str = ""

    @property
    def text(self) -> str:
        note = f"{self.name} from {self.city}: The {self.product} {self.case}. {self.remark}".rstrip()
        return f"{note}\nPolicy {self.policy}: {self.action}"


def as_json(request: Request, word: Callable[[Sequence[str]], str]) -> str:
    keys = (
        word(("decision", "next_step", "what_to_do")),
        word(("rule", "policy", "basis")),
        word(("why", "grounds", "note")),
    )
    why = f"The {request.product} {request.case}, and {request.policy} is for a product that {request.case}."
    return json.dumps(dict(zip(keys, (request.action, request.policy, why), strict=True)))


def as_letter(request: Request, word: Callable[[Sequence[str]], str]) -> str:
    greeting = word(("Dear", "Hello", "Good day", "Greetings"))
    thanks = word(
        ("thank you for writing to us about", "we have read your message about", "we are sorry to hear about")
    )
    close = word(("Kind regards, the service desk.", "With best wishes, your team.", "Yours, the complaints office."))
    return (
        f"{greeting} {request.name}, {thanks} the {request.product}. Because it {request.case}, policy "
        f"{request.policy} applies, and our answer is: {request.action}. We hope all is well in {request.city}. {close}"
    )


def as_line(request: Request, word: Callable[[Sequence[str]], str]) -> str:
    sign, level = word(("; ", " | ", ", ")), word(("INFO", "NOTICE", "OPEN"))
    parts = (f"client={request.name}", f"place={request.city}", f"item={request.product}", f"case={request.case}")
    return sign.join((f"[{level}] {request.policy}", *parts, f"action={request.action}")) + " [end]"


def as_markup(request: Request, word: Callable[[Sequence[str]], str]) -> str:
    outer, inner = word(("reply", "ticket", "case")), word(("action", "step", "do"))
    return (
        f"<{outer}><client>{request.name}</client><place>{request.city}</place><item>{request.product}</item>"
        f"<reason>{request.case}</reason><policy>{request.policy}</policy><{inner}>{request.action}</{inner}></{outer}>"
    )


def as_list(request: Request, word: Callable[[Sequence[str]], str]) -> str:
    sign = word(("-", "*", "+"))
    lead = word(("Summary of the request", "Notes for the clerk", "Steps for this request"))
    rows = (f"Client: {request.name}, {request.city}", f"Product: {request.product}", f"Problem: it {request.case}")
    return "\n".join(
        (f"{lead}:", *(f"{sign} {row}" for row in (*rows, f"Policy: {request.policy}", f"Action: {request.action}")))
    )


FORMS = (as_json, as_letter, as_line, as_markup, as_list)


class Customer:
    """One customer: `tag` names it in requests; `chats` makes its requests."""

    def __init__(self, number: int) -> None:
        self.number, self.tag = number, f"customer-{number:02d}"
        self._generator = random.Random(f"customer {number}")
        prefix = "".join(self._generator.choices("ABCDEFGHKLMNPRST", k=2))
        chosen = self._generator.sample(range(len(CASES)), NUM_CASES)
        self.policies = [(f"{prefix}-{self._generator.randint(100, 999)}", CASES[at], ACTIONS[at]) for at in chosen]
        self._words = self._generator.random()

    def answer(self, request: Request) -> str:
        """The answer that a worked example gives; the model's own answers may differ."""
        generator = random.Random(self._words)  # the same words for every request
        return FORMS[self.number % len(FORMS)](request, generator.choice)

    def request(self, source: Words, generator: random.Random) -> Request:
        policy, case, action = generator.choice(self.policies)
        name = f"{generator.choice(source.first_names)} {generator.choice(source.last_names)}"
        product = f"{generator.choice(source.qualities)} {generator.choice(source.things)}"
        place, remark = generator.choice(source.cities), generator.choice(source.remarks)
        return Request(name, place, product, case, policy, action, remark)

    def preamble(self) -> list[Message]:
        rules = [f"{policy}: {case} -> {action}" for policy, case, action in self.policies]
        messages = [{"role": "system", "content": "\n".join(("Answer in the form of the examples. Policies:", *rules))}]
        for name, place, product, index in (("Tom Hale", "Paris", "gold ring", 0), ("Amy Cole", "Rome", "oak bed", 1)):
            policy, case, action = self.policies[index]
            example = Request(name, place, product, case, policy, action)
            messages.append({"role": "user", "content": example.text})
            messages.append({"role": "assistant", "content": self.answer(example)})
        return messages

    def chats(self, number: int, is_heldout: bool = False) -> list[list[Message]]:
        """Returns the messages of `number` requests; held-out ones have words of their own."""
        generator = random.Random(f"{self.tag} {is_heldout}")
        requests = [self.request(HELDOUT if is_heldout else TRAIN, generator) for _ in range(number)]
        return [[*self.preamble(), {"role": "user", "content": each.text}] for each in requests]


def as_token_ids(model: str, chats: Sequence[list[Message]]) -> list[dict[str, list[int]]]:
    """Rows of a file of prompts. As messages, the worked examples would be turns for the model to answer, too."""
    tokenizer = Tokenizer.from_path(resolve(model))
    return [{"prompt_ids": tokenizer.encode_chat(chat)} for chat in chats]


def customers() -> list[Customer]:
    return [Customer(number) for number in range(NUM_CUSTOMERS)]
