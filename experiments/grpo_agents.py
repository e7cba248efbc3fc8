"""Agents that solve word problems with a calculator, for `grpo_tools.py`: one in plain Python, the same with LangGraph.

The policy may write <tool>12 + 7</tool>; the agent computes that and says "Result: 19"; the policy then answers. The
reward is by code, a part of it for every step on the way, so that a small model finds its way: a call 0.1, one that can
be computed 0.2, the right value 0.4, the right answer in the end 0.3.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from typing import Any

from paceline.loop.rl.agents import Access, Trajectory

OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
CALL = re.compile(r"<tool>([^<]*)</tool>")
LONGEST_EXPRESSION = 60
MOST = 10**9
STORIES = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", "{a} + {b}"),
    ("There are {a} {things} in a shop and {b} in a store. How many {things} are there in all?", "{a} + {b}"),
    ("{name} has {a} {things} and gives {b} away. How many {things} are left?", "{a} - {b}"),
    ("Of {a} {things}, {b} are sold. How many {things} are left?", "{a} - {b}"),
    ("{name} buys {b} boxes of {a} {things} each. How many {things} are that?", "{a} * {b}"),
    ("{b} children carry {a} {things} each. How many {things} do they carry?", "{a} * {b}"),
    ("{name} has {a} {things}, gets {b} more and loses {c}. How many {things} are left?", "{a} + {b} - {c}"),
)
NAMES, THINGS = ("Ann", "Ben", "Chen", "Dora", "Emil", "Fatou"), ("apples", "books", "coins", "stones", "cards", "eggs")
EXAMPLE = [
    {
        "role": "system",
        "content": "Solve the problem with the calculator: write <tool>expression</tool>, then give the answer.",
    },
    {"role": "user", "content": "A farm has 12 hens and buys 7 more. How many hens are there?"},
    {"role": "assistant", "content": "<tool>12 + 7</tool>"},
    {"role": "user", "content": "Result: 19"},
    {"role": "assistant", "content": "The answer is 19."},
]


def problems(number: int, seed: int) -> list[dict[str, Any]]:
    """Generated word problems with their answers, the same for the same seed."""
    rng, questions = random.Random(seed), list[dict[str, Any]]()
    for _ in range(number):
        story, expression = rng.choice(STORIES)
        most = 12 if "*" in expression else 60
        numbers = {"a": rng.randint(60, 99), "b": rng.randint(2, most), "c": rng.randint(2, 50)}
        text = story.format(name=rng.choice(NAMES), things=rng.choice(THINGS), **numbers)
        questions.append({"question": text, "answer": value_of(expression.format(**numbers))})
    return questions


def value_of(expression: str) -> int | None:
    """The value of a sum, difference or product of whole numbers; None of anything else, and of what is absurdly
    large."""
    if len(expression) > LONGEST_EXPRESSION:
        return None
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= MOST:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        if abs(value) <= MOST:
            return value
    raise ValueError("not a calculator's business")


def plain_agent(task: dict[str, Any], access: Access) -> list[str]:
    """Two turns at most: a call, its result, the answer. Returns what the policy said."""
    messages = [*EXAMPLE, {"role": "user", "content": task["question"]}]
    reply = str(access.chat(messages)["content"])
    call = CALL.search(reply)
    value = value_of(call[1]) if call else None
    if value is None:
        return [reply]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"Result: {value}"}]
    return [reply, str(access.chat(messages)["content"])]


def langgraph_agent(task: dict[str, Any], access: Access) -> list[str]:
    """The same as a graph of two nodes. Needs pip install langgraph langchain-openai."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    model = ChatOpenAI(base_url=access.base_url, model=access.model, api_key=access.api_key)

    def policy(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def calculator(state: Any) -> Any:
        call = CALL.search(state["messages"][-1].content)
        assert call
        return {"messages": [{"role": "user", "content": f"Result: {value_of(call[1])}"}]}

    def after_policy(state: Any) -> str:
        is_first = len(state["messages"]) == len(EXAMPLE) + 2
        call = CALL.search(state["messages"][-1].content)
        return "calculator" if is_first and call and value_of(call[1]) is not None else END

    graph = StateGraph(MessagesState)
    graph.add_node("policy", policy)
    graph.add_node("calculator", calculator)
    graph.add_edge(START, "policy")
    graph.add_conditional_edges("policy", after_policy)
    graph.add_edge("calculator", "policy")
    start = [*EXAMPLE, {"role": "user", "content": task["question"]}]
    ended = graph.compile().invoke({"messages": start})["messages"]
    return [str(each.content) for each in ended[len(start) :] if each.type == "ai"]


def reward(task: dict[str, Any], attempt: Trajectory) -> float:
    """0 to 1, by code; see above."""
    texts = attempt.texts
    call = CALL.search(texts[0])
    if not call:
        return 0.0
    value = value_of(call[1])
    if value is None:
        return 0.1
    numbers = re.findall(r"-?\d+", texts[-1]) if len(texts) > 1 else []
    is_told = bool(numbers) and int(numbers[-1][:12]) == task["answer"]
    return 0.3 + 0.4 * (value == task["answer"]) + 0.3 * is_told


AGENTS = {"plain": plain_agent, "langgraph": langgraph_agent}
