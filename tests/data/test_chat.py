import pytest

from miles.data.chat import ChatError, RewritesHistory, UnalignedTurn, encode_chat, encode_last_turn, following_tokens, split_turns
from tests.data.tokenizers_for_tests import CHATML, DROPS_THINKING, END, JOINS_TOOL_RESULTS, WRITES_BOS, assistant, byte_tokenizer, tool, user

TWO_TURNS = [user("one"), assistant("ONE"), user("two"), assistant("TWO")]
THINKING = [user("one"), assistant("<think>hm</think>ONE"), user("two"), assistant("<think>so</think>TWO")]


def marked(tokenizer, conversation) -> list[str]:
    return [tokenizer.decode(conversation.tokens_T[t.start : t.stop].tolist()) for t in conversation.turns]


def test_ids_are_those_of_the_models_full_template():
    tokenizer = byte_tokenizer(WRITES_BOS, adds_bos=True)
    assert encode_chat(tokenizer, TWO_TURNS).tokens_T.tolist() == tokenizer.apply_chat_template(TWO_TURNS, return_dict=False)


def test_each_assistant_turn_is_marked_with_its_end_token_and_nothing_more():
    tokenizer = byte_tokenizer()
    assert marked(tokenizer, encode_chat(tokenizer, TWO_TURNS)) == ["ONE" + END, "TWO" + END]


def test_the_mask_is_true_on_the_turns_alone():
    tokenizer = byte_tokenizer()
    conversation = encode_chat(tokenizer, TWO_TURNS)
    kept = conversation.tokens_T[conversation.mask_T].tolist()
    assert tokenizer.decode(kept) == f"ONE{END}TWO{END}"


@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_the_end_token_of_the_answer_is_marked_also_when_it_is_the_pad_token(pad_is_eos):
    tokenizer = byte_tokenizer(pad_is_eos=pad_is_eos)
    conversation = encode_chat(tokenizer, TWO_TURNS)
    assert (tokenizer.pad_token_id == tokenizer.eos_token_id) == pad_is_eos
    assert [int(conversation.tokens_T[t.stop - 1]) for t in conversation.turns] == [tokenizer.eos_token_id] * 2


def test_a_template_without_an_end_token_keeps_the_whole_turn():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert marked(tokenizer, encode_chat(tokenizer, TWO_TURNS)) == ["ONE\n", "TWO\n"]


def test_a_template_that_drops_earlier_thinking_is_refused_by_turn():
    with pytest.raises(RewritesHistory, match=r"turn \(message 1\)"):
        encode_chat(byte_tokenizer(DROPS_THINKING), THINKING)


def test_the_same_template_without_thinking_is_not_refused():
    tokenizer = byte_tokenizer(DROPS_THINKING)
    assert len(encode_chat(tokenizer, TWO_TURNS).turns) == 2


def test_split_turns_show_each_turn_as_the_model_wrote_it():
    tokenizer = byte_tokenizer(DROPS_THINKING)
    first, second = split_turns(tokenizer, THINKING)
    assert marked(tokenizer, first) == [f"<think>hm</think>ONE{END}"]
    assert marked(tokenizer, second) == [f"<think>so</think>TWO{END}"]
    assert second.tokens_T.tolist() == tokenizer.apply_chat_template(THINKING, return_dict=False)
    assert "hm" not in tokenizer.decode(second.tokens_T.tolist())


def test_the_last_turn_alone_does_not_mind_how_history_is_shown():
    tokenizer = byte_tokenizer(DROPS_THINKING)
    assert marked(tokenizer, encode_last_turn(tokenizer, THINKING)) == [f"<think>so</think>TWO{END}"]


def test_a_token_across_the_boundary_is_refused_and_not_guessed():
    tokenizer = byte_tokenizer(CHATML, merges=(("Ċ", "Ċ"),))
    with pytest.raises(UnalignedTurn, match="message 1"):
        encode_chat(tokenizer, [user("a"), assistant("\nb")])


def test_a_conversation_that_begins_with_the_assistant_is_refused():
    with pytest.raises(ChatError, match="no message before the assistant's first turn"):
        encode_chat(byte_tokenizer(), [assistant("hello")])


CALL = [user("weather?"), assistant("call call")]
RESULTS = [tool("sunny"), tool("dry")]


@pytest.mark.parametrize("template", [CHATML, JOINS_TOOL_RESULTS])
def test_two_consecutive_tool_results_give_the_ids_of_the_full_template(template):
    tokenizer = byte_tokenizer(template)
    whole = tokenizer.apply_chat_template([*CALL, *RESULTS], add_generation_prompt=True, return_dict=False)
    turn = encode_chat(tokenizer, CALL).turns[0]
    before = encode_chat(tokenizer, CALL).tokens_T[: turn.stop].tolist()
    assert before + following_tokens(tokenizer, CALL, RESULTS).tolist() == whole


def test_what_follows_a_turn_begins_after_the_end_token_that_the_model_sampled():
    tokenizer = byte_tokenizer()
    text = tokenizer.decode(following_tokens(tokenizer, CALL, [tool("sunny")]).tolist())
    assert text == "\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"


def test_going_on_under_a_template_that_rewrites_history_is_refused():
    tokenizer = byte_tokenizer(DROPS_THINKING)
    with pytest.raises(RewritesHistory):
        following_tokens(tokenizer, [user("one"), assistant("<think>hm</think>ONE")], [user("two")])


def test_what_follows_a_turn_does_not_depend_on_how_the_model_tokenised_it():
    tokenizer = byte_tokenizer(merges=(("a", "b"),))
    opening = tokenizer.apply_chat_template([user("x")], add_generation_prompt=True, return_dict=False)
    sampled = [tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", END)]  # the tokenizer itself would write ab as one token
    messages = [user("x"), assistant("ab")]
    trajectory = opening + sampled + following_tokens(tokenizer, messages, [tool("r")]).tolist()
    assert trajectory[len(opening) : len(opening) + 3] == sampled
    assert tokenizer.encode("ab") != sampled[:2]
    assert tokenizer.decode(trajectory) == tokenizer.apply_chat_template([*messages, tool("r")], add_generation_prompt=True, tokenize=False)
