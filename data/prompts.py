"""From a problem to the token ids of its prompt, and from a completion to its text."""

import json
from contextlib import suppress
from functools import partial

from rewards import verifier

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.")
ORZ = (" You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here "
       "</answer>. And your final answer will be extracted automatically by the \\boxed{{}} tag. "
       "This is the problem:")
TURNS = "\nUser: {question}\nAssistant: <think>"
PLAIN = dict(r1_zero=R1_ZERO + TURNS, orz=R1_ZERO + ORZ + TURNS, none="{question}")
TEMPLATES = ("chat", "qwen_boxed", *PLAIN)  # the first two use a chat template


def template_kwargs(text, template):
    """--template_kwargs as a dict, {} for None. Raises ValueError, a sentence."""
    with suppress(ValueError):
        found = json.loads(text or "{}")
        if isinstance(found, dict) and (not found or template not in PLAIN):
            return found
    raise ValueError("--template_kwargs is a JSON object, such as {\"enable_thinking\": false}, "
                     f"for the templates chat and qwen_boxed: not {text}, --template {template}")


def as_text(messages):
    """The prompt of a row that has messages alone; of several it is for display only."""
    return "\n\n".join(message["content"] for message in messages)


def in_turns(tokenizer, messages):
    """The text of messages in the chat template; a last one of the assistant's is continued. A
    system message that the template refuses, or leaves out, begins the user's turn."""
    from jinja2 import TemplateError  # of raise_exception in a template
    begun = messages[-1]["role"] == "assistant"
    form = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=not begun,
                   continue_final_message=begun)
    system = messages[0]["content"]
    if messages[0]["role"] == "system":
        with suppress(TemplateError):
            text = form(messages)
            if system.strip() in text:
                return text
        _, user, *rest = messages
        messages = [dict(user, content=f"{system}\n\n{user['content']}"), *rest]
    return form(messages)


def encode(tokenizer, problem, template=None):
    """The token ids of a problem's prompt. template: one of TEMPLATES; None is "none" without a
    chat template, with one "qwen_boxed" for mathematics without messages, else "chat". Raises
    ValueError for several messages, and no prompt beside them, in a template of PLAIN."""
    turns = problem.get("messages")
    if template is None:
        boxed = not turns and "verifier" in problem and verifier(problem["verifier"]).boxed
        template = ("qwen_boxed" if boxed else "chat") if tokenizer.chat_template else "none"
    if template in PLAIN:
        if turns and len(turns) > 1 and problem["prompt"] == as_text(turns):
            raise ValueError("several messages take a chat template, or a field prompt")
        return tokenizer.encode(PLAIN[template].format(question=problem["prompt"]))
    user = dict(role="user", content=problem["prompt"])
    messages = ([dict(role="system", content=BOXED), user] if template == "qwen_boxed" else
                turns or [user])
    return tokenizer.encode(in_turns(tokenizer, messages), add_special_tokens=False)


def decode(tokenizer, completion, prompt=()):
    """The text of a Completion, without the end-of-sequence token that ends it. A <think> that is
    open at the prompt's end (token ids) is put in front: a verifier has to know of it."""
    has_eos = not (completion.truncated or completion.stopped)
    text = tokenizer.decode(completion.tokens[:-1] if has_eos else completion.tokens)
    return "<think>" * tokenizer.decode(prompt[-64:]).rstrip().endswith("<think>") + text
