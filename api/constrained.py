"""From what a request says of its output to the grammar that replicas get, for the model that is served."""

from collections.abc import Callable

from api.constraint import Constraint, Writer, is_written
from api.errors import BadInput
from api.model import Model
from api.reading import forced
from api.reading.thinking import BEGIN, END
from api.schemas.openai import ChatRequest, NamedTool
from worker.tokenizer import Tokenizer


def constrained(constraint: Constraint | None, model: Model) -> str:
    """The grammar of a constraint, "" for none. Raises BadInput."""
    if constraint is None:
        return ""
    if constraint.kind == "grammar" and is_written(constraint.value):
        _tokenizer(model)
        return str(constraint.value)
    return _written(model, lambda write: write.of(constraint))


def of_chat(body: ChatRequest, model: Model, *, opened: bool | None) -> str:
    """The grammar of an answer: of the calls that it has to be, or may be beside what it is constrained to.

    opened: whether reasoning comes before, which no grammar holds: True = the prompt opened it, False = the model may,
    None = there is none. Raises BadInput.
    """
    constraint, form = body.constraint, model.tool_format
    if not body.must_call and constraint is None:
        return ""
    several = body.parallel_tool_calls is not False

    def answer(write: Writer) -> str:
        ways = [] if constraint is None else [write.of(constraint)]
        if body.may_call and form is not None:
            choice = body.tool_choice
            name = choice.function.name if isinstance(choice, NamedTool) else None
            tools = [tool for tool in body.tools or [] if name in (None, tool["function"]["name"])]
            ways.append(forced.calls(write, form, tools, several=several and name is None))
        said = write.rule(" | ".join(ways))
        if opened is None:
            return said
        thought = f"{write.until(END)} SPACES?"
        return f"{thought} {said}" if opened else f"({write.mark(BEGIN)} {thought})? {said}"

    return _written(model, answer)


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise BadInput("output can only be constrained with a tokenizer, and this checkpoint has none")
    return model.tokenizer


def _written(model: Model, start: Callable[[Writer], str]) -> str:
    tokenizer = _tokenizer(model)
    write = Writer(lambda text: tokenizer.special_id(text) is not None)
    try:
        body = start(write)
    except RecursionError:
        raise BadInput("the schema is nested too deeply") from None
    return write.written(body)
