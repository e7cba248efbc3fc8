"""Three applications for `synthetic_share.py`: what each says before its users do, what its answers are, and its users.

tickets       the shop of recipes/support_tickets.py: an action, a policy and a sentence, as JSON
extraction    orders in free text, and their parts as JSON
tools         a call of one of four tools

Users of training and of measuring have no name, city, product or remark in common. Seeded.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.model.tools import call_schema

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
from support_tickets import (
    HELDOUT,
    POLICIES,
    TRAIN,
    Words,
    heldout_tickets,
    preamble,
    train_tickets,
)

Message = dict[str, str]
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
REASONS = {"damaged": "arrived damaged", "wrong_item": "is not what I ordered", "late": "came far too late"}


@dataclass(frozen=True)
class Application:
    """What is known of it before it has users, and its users."""

    name: str
    opening: list[Message]
    """Its system message first, then worked examples."""
    schema: str
    """Of its answers, JSON."""
    users: Callable[[int, bool], list[str]]
    """(number, whether they are those that are measured with) -> what they say."""
    openers: tuple[str, ...]
    """How its developer guesses that users begin; no real request begins so."""
    tools: list[dict[str, Any]] | None = None

    def rows(self, number: int, heldout: bool) -> list[dict[str, Any]]:
        """Prompts as `paceline regenerate` reads them."""
        said = self.users(number, heldout)
        if any(text.startswith(tuple(opener.partition("{")[0] for opener in self.openers)) for text in said):
            raise ValueError(f"an opener of {self.name} stands in a real request: it is no guess")
        return [
            {"id": f"{self.name}-{place}", "messages": [*self.opening, {"role": "user", "content": text}]}
            for place, text in enumerate(said)
        ]


def an_object(**properties: Any) -> dict[str, Any]:
    """All properties required, no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def words(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def different(make: Callable[[random.Random, Words], str], number: int, heldout: bool, seed: str) -> list[str]:
    luck, source = random.Random(f"{seed} {heldout}"), HELDOUT if heldout else TRAIN
    texts: dict[str, None] = {}
    while len(texts) < number:
        texts[make(luck, source)] = None
    return list(texts)


def tickets() -> Application:
    def users(number: int, heldout: bool) -> list[str]:
        rows = heldout_tickets(number) if heldout else train_tickets(number)
        return [row["messages"][-1]["content"] for row in rows]

    schema = an_object(
        action={"enum": [policy.action for policy in POLICIES]},
        policy_id={"enum": [policy.id for policy in POLICIES]},
        reasoning=words(320),
    )
    names = ("Lucas Grey from", "Mia Winter from", "Omar Field from", "Ines Marsh from", "Noah Brook from", "Yuki Wood from")
    return Application("tickets", preamble(), json.dumps(schema), users, names)


def an_order(luck: random.Random, source: Words) -> tuple[str, dict[str, Any]]:
    """A customer's message, and what is in it."""
    name = f"{luck.choice(source.first_names)} {luck.choice(source.last_names)}"
    order = {"customer": name, "city": luck.choice(source.cities), "quantity": luck.randint(1, 9)}
    order |= {"product": f"{luck.choice(source.qualities)} {luck.choice(source.things)}", "delivery": luck.choice(DAYS)}
    shown = {key: str(value) for key, value in order.items()}
    forms = (
        "Hello, this is {customer} from {city}. Please send me {quantity} x {product} on {delivery}.",
        "I would like to order {quantity} pieces of the {product}. Delivery to {city} on {delivery}, please. {customer}",
        "{customer} here. We need {quantity} of your {product} in {city}, best by {delivery}.",
    )
    return f"{luck.choice(forms).format(**shown)} {luck.choice(source.remarks)}".rstrip(), order


def extraction() -> Application:
    schema = an_object(
        customer=words(40), city=words(30), quantity={"type": "integer", "minimum": 1, "maximum": 99},
        product=words(60), delivery={"enum": list(DAYS)},
    )  # fmt: skip
    instruction = "Read each message and answer with one JSON object of the keys customer, city, quantity, product, delivery."
    opening = [{"role": "system", "content": instruction}]
    shop = Words(("Tom", "Amy"), ("Hale", "Cole"), ("Paris", "Rome"), ("gold", "oak"), ("ring", "bed"), ("It is urgent.",))
    for seed in range(2):
        text, order = an_order(random.Random(seed), shop)
        answer = json.dumps({key: order[key] for key in schema["properties"]})
        opening += [{"role": "system", "content": text}, {"role": "assistant", "content": answer}]
    return Application(
        "extraction",
        opening,
        json.dumps(schema),
        lambda number, heldout: different(lambda luck, source: an_order(luck, source)[0], number, heldout, "order"),
        ("My name is", "Could you send", "Please deliver", "Good morning, we are", "Can I have", "We want to order"),
    )


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": an_object(**properties)},
    }


TOOLS = [
    tool("order_status", "Where an order is.", order_id={"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}),
    tool(
        "refund",
        "Pay an order back.",
        order_id={"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
        reason={"enum": list(REASONS)},
        message=words(120),
    ),
    tool("find_product", "Look for products.", query=words(60), city=words(30), most={"enum": [3, 5, 10]}),
    tool("book_call", "Have somebody call.", customer=words(40), day={"enum": list(DAYS)}, topic=words(80)),
]


def a_wish(luck: random.Random, source: Words) -> str:
    name = f"{luck.choice(source.first_names)} {luck.choice(source.last_names)}"
    order = f"{luck.choice('ABKLMR')}{luck.choice('DEXTZ')}{luck.randint(1000, 9999)}"
    product = f"{luck.choice(source.qualities)} {luck.choice(source.things)}"
    city, remark = luck.choice(source.cities), luck.choice(source.remarks)
    said = luck.choice(
        (
            f"Where is my order {order}? {remark}",
            f"I want my money back for {order}: the {product} {luck.choice(list(REASONS.values()))}. {remark}",
            f"Do you have a {product} in {city}? {remark}",
            f"I am {name}. Please call me on {luck.choice(DAYS)} about the {product}.",
        )
    )
    return said.rstrip()


def tool_calls() -> Application:
    opening = [{"role": "system", "content": "You answer for a shop. Call the tool that helps the customer."}]
    openers = (
        "Has my order {order_id}",
        "Could I",
        "Are there any",
        "Please ring me",
        "My parcel {order_id}",
        "Is it possible",
    )
    return Application(
        "tools",
        opening,
        call_schema(TOOLS),
        lambda number, heldout: different(a_wish, number, heldout, "wish"),
        openers,
        TOOLS,
    )


APPLICATIONS = {"tickets": tickets, "extraction": extraction, "tools": tool_calls}
