"""Support tickets of an invented shop: the workload that recipes/custom_workload.sh fine-tunes a drafter on.

    python recipes/support_tickets.py --train 1500 --heldout 60 --out DIR

Writes train.jsonl and heldout.jsonl, one OpenAI-style {"id", "messages"} a line, for `paceline regenerate --prompts`
and `paceline evaluate --prompts`. The first system message states the shop's policies and the JSON that is wanted.
Worked examples follow as system and assistant messages: a model of 135M parameters keeps to a form that it sees in
turns, and loses one that is only described. The user message is the ticket, with the policy that the shop's routing
attached. Held-out tickets have customers, cities, products and remarks of their own; the kinds of request are the same.
Seeded: the same files each time, and the first tickets do not depend on how many are asked for.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]

INSTRUCTION = (
    "Answer each ticket of the shop with one JSON object with the keys action, policy_id, reasoning. Policies:"
)


@dataclass(frozen=True, slots=True)
class Policy:
    """One entry of the shop's policies: what to do with a product of which `case` is true."""

    id: str
    case: str
    action: str


POLICIES = (
    Policy("RF-204", "was damaged", "refund"),
    Policy("EX-118", "has the wrong size", "exchange"),
    Policy("SH-310", "was not delivered", "trace"),
    Policy("RP-127", "stopped working", "repair"),
    Policy("CN-405", "is not wanted", "cancel"),
    Policy("BL-532", "was charged twice", "credit"),
    Policy("MP-219", "has missing parts", "resend"),
    Policy("AD-641", "has a new address", "redirect"),
    Policy("GW-753", "is a gift", "wrap"),
    Policy("IN-866", "needs an invoice", "invoice"),
)


@dataclass(frozen=True, slots=True)
class Words:
    """What tickets are filled with; train and held-out have none of them in common."""

    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    cities: tuple[str, ...]
    qualities: tuple[str, ...]
    things: tuple[str, ...]
    remarks: tuple[str, ...]


def words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", "|").split("|"))


TRAIN = Words(
    first_names=words("""Anna|Ben|Carla|David|Emma|Frank|Grace|Henry|Irene|Jack|Karen|Leo|Maria|Nick|Olivia|Paul|Rachel|Sam|Tina
    Victor|Alice|Brian|Claire|Daniel|Elena|George|Hannah|Ivan|Julia|Kevin|Laura|Martin|Nora|Oscar|Peter|Rosa|Simon|Teresa|Adam
    Bella|Chris|Diana|Eric|Fiona|Gary|Helen|Jason|Kate|Lisa|Mark|Robert|Susan|Michael|Linda|James|Sarah|Andrew|Julie"""),
    last_names=words("""Adams|Baker|Carter|Davis|Evans|Foster|Garcia|Harris|Irwin|Jones|Kelly|Lopez|Moore|Nelson|Owens|Parker
    Quinn|Reed|Smith|Taylor|Underwood|Vance|Walker|Young|Allen|Brown|Clark|Dixon|Ellis|Fisher|Green|Hill|Jackson|King|Lewis|Miller
    Newman|Perry|Roberts|Stone|Anderson|Martinez|Thompson|Wright|Scott|Campbell|Mitchell|Phillips|Cooper|Morgan"""),
    cities=words("""London|Berlin|Madrid|Boston|Chicago|Seattle|Toronto|Dublin|Vienna|Oslo|Lisbon|Houston|Phoenix|Atlanta|Portland
    Sydney|Athens|Milan|Prague|Geneva|Detroit|Cleveland|Montreal|Glasgow|Bristol|Hamburg|Munich|Lyon|Warsaw|Budapest|Orlando
    Philadelphia|Baltimore|Charlotte|Nashville|Oakland|Auckland|Melbourne|Stockholm|Helsinki"""),
    qualities=words("""red|blue|black|white|wooden|leather|steel|small|large|folding|green|cotton|glass|silver|electric|vintage
    portable|grey|wireless|heavy|metal|orange|striped|light|waterproof|thin|ceramic|soft"""),
    things=words("""desk lamp|office chair|coffee maker|backpack|rain jacket|running vest|toaster|bookshelf|headset|kettle
    camping tent|wall clock|blender|phone case|winter coat|garden hose|picture frame|keyboard|suitcase|yoga mat|mirror
    baby stroller|bicycle helmet|dining table|hair dryer|umbrella|water bottle|wrist watch|tool box|printer|radio|sofa cover
    bath towel|dog bed|board game|guitar stand|speaker|straw hat|vacuum cleaner|fishing rod|tea pot|mouse pad|night stand
    ski mask|paint brush|bird cage|flower pot|camera|carpet|door mat|sleeping bag|candle holder|salad bowl|ladder|vase"""),
    remarks=words("""I ordered it last Monday.|I bought it two weeks ago.|I paid by card.|It is for my sister.|Please help.
    Thank you.|I am a regular customer.|I have waited for ten days.|This is my first order.|I have the receipt.
    I am travelling next month.|My daughter needs it for school.|I used a discount code.|What can you do?
    Please write back soon.|I ordered two of them.
    We met your team at the fair.|I called you yesterday.|It was on sale.|I am at home after five."""),
)  # fmt: skip

HELDOUT = Words(
    first_names=words("Sophie|Thomas|Wendy|Arthur|Bianca|Edward|Gloria|Hugo|Monica|Philip|Ruth|Stefan|Vera|Walter"),
    last_names=words("Bennett|Coleman|Dawson|Fletcher|Griffin|Howard|Jenkins|Murphy|Porter|Russell|Spencer|Turner|Webb"),
    cities=words("Denver|Austin|Dallas|Miami|Tampa|Naples|Zurich|Manchester|Brussels|Edinburgh"),
    qualities=words("yellow|brown|plastic|bamboo|round|compact|purple|copper"),
    things=words("""floor fan|hiking stick|rice cooker|laptop stand|wool sweater|shower curtain|piano bench|alarm clock|tea set
    bar stool|swim cap|lunch box|garden bench|travel bag|pillow|bread knife"""),
    remarks=words("""I ordered it on Friday.|I bought it in March.|I paid in cash.|My brother is waiting for it.|Please hurry.
    My neighbour recommended your shop.|I have sent photos.|When will I hear from you?"""),
)  # fmt: skip

EXAMPLES = (
    ("Tom Hale", "Paris", "gold ring", "", "BL-532"),
    ("Amy Cole", "Rome", "oak bed", "I bought it in a hurry.", "RP-127"),
)
"""Customer, city, product, remark and policy of the worked examples."""


def ticket(name: str, city: str, product: str, remark: str, policy: Policy) -> str:
    """What the model is given: who wrote what, and the policy that routing found."""
    return (
        f"{name} from {city}: The {product} {policy.case}. {remark}".rstrip() + f"\nPolicy {policy.id}: {policy.action}"
    )


def answer(name: str, city: str, product: str, policy: Policy) -> str:
    """What a worked example answers."""
    reasoning = (
        f"The {product} {policy.case}. Policy {policy.id} applies, because it is for a product that {policy.case}. "
        f"The action for {name} from {city} is {policy.action}."
    )
    return json.dumps({"action": policy.action, "policy_id": policy.id, "reasoning": reasoning})


def preamble() -> list[Message]:
    """Everything before the ticket; the same for all."""
    policies = [f"{policy.id}: {policy.case} -> {policy.action}" for policy in POLICIES]
    messages = [{"role": "system", "content": "\n".join([INSTRUCTION, *policies])}]
    by_id = {policy.id: policy for policy in POLICIES}
    for name, city, product, remark, policy_id in EXAMPLES:
        policy = by_id[policy_id]
        messages.append({"role": "system", "content": ticket(name, city, product, remark, policy)})
        messages.append({"role": "assistant", "content": answer(name, city, product, policy)})
    return messages


def random_ticket(policy: Policy, source: Words, generator: random.Random) -> str:
    name = f"{generator.choice(source.first_names)} {generator.choice(source.last_names)}"
    product = f"{generator.choice(source.qualities)} {generator.choice(source.things)}"
    return ticket(name, generator.choice(source.cities), product, generator.choice(source.remarks), policy)


def tickets(number: int, source: Words, generator: random.Random, prefix: str) -> list[dict[str, Any]]:
    """`number` different tickets, the policies in turn."""
    before = preamble()
    texts: dict[str, str] = {}
    while len(texts) < number:
        policy = POLICIES[len(texts) % len(POLICIES)]
        texts[random_ticket(policy, source, generator)] = policy.id
    return [
        {"id": f"{prefix}-{index}-{policy_id}", "messages": [*before, {"role": "user", "content": text}]}
        for index, (text, policy_id) in enumerate(texts.items())
    ]


def train_tickets(number: int, seed: int = 0) -> list[dict[str, Any]]:
    return tickets(number, TRAIN, random.Random(f"train {seed}"), "train")


def heldout_tickets(number: int, seed: int = 0) -> list[dict[str, Any]]:
    return tickets(number, HELDOUT, random.Random(f"heldout {seed}"), "heldout")


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} tickets in {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=1500, help="tickets to learn from")
    parser.add_argument("--heldout", type=int, default=60, help="tickets to measure on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    write_lines(given.out / "train.jsonl", train_tickets(given.train, given.seed))
    write_lines(given.out / "heldout.jsonl", heldout_tickets(given.heldout, given.seed))


if __name__ == "__main__":
    main()
