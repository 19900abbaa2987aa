"""A small grammar of stories, facts and dialogues: endless text about one small world, the same for the same seed.

A template is English with slots. ``<town>`` draws a fresh town, ``<home=town>`` draws one and remembers it, and from
then on ``<home>`` recalls it: that is how names, things and places agree over sentences and turns.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

import words

T = TypeVar("T")
Row = dict[str, object]
Turns = list[tuple[str, str]]

SLOT = re.compile(r"<(?:(\w+)=)?(\w+)>")

RULES = {
    "name": [name for pair in zip(words.WOMEN, words.MEN, strict=False) for name in pair],
    "town": words.TOWNS,
    "trade": words.TRADES,
    "animal": words.ANIMALS,
    "mood": words.MOODS,
    "quality": words.QUALITIES,
    "thing": words.THINGS,
    "food": words.FOODS,
    "building": words.BUILDINGS,
    "pastime": words.PASTIMES,
    "weather": words.WEATHERS,
    "hour": words.HOURS,
    "day": words.DAYS,
    "count": words.COUNTS,
    "near": words.NEAR,
    "deed": words.DEEDS,
    # parts of sentences
    "spot": ["<near> the <building>", "<near> the <quality> <building>", "<near> the <building> of <town>"],
    "goods": ["a <quality> <thing>", "<count> <food>", "a <mood> <animal>", "<count> <quality> <food>"],
    "person": ["<name> the <trade>", "<name> of <town>", "a <mood> <trade>", "<name> the <mood> <animal>"],
    "went": ["walked", "ran", "sailed", "danced", "rode a <mood> <animal>"],
    "when": ["One <weather> <hour>", "On a <weather> <day>", "Last <day>"],
    # stories
    "opening": [
        "In <home=town> lived a <mood> <job=trade> named <hero>.",
        "<hero> the <mood> <job=trade> of <home=town> loved <pastime>, <pastime> and <food>.",
        "<hero>, a <mood> <job=trade>, moved to <home=town> with <goods> and <goods>.",
        "Nobody in <home=town> was as <mood> as <hero> the <job=trade>.",
    ],
    "ending": [
        "<pal> gave <hero> <goods> and <goods>.",
        "Now <hero> and <pal> go <pastime> every <day> and eat <food> <spot>.",
        '"You are <mood>," said <pal>, and <hero> went <pastime>.',
        "<pal> laughed, <hero> ate <food>, and <person> sang about <goods>.",
    ],
    "story": ["<found>", "<guest>", "<barter>", "<contest>", "<journey>"],
    "found": [
        "<opening> <when>, <they> found a <quality> <item=thing> <spot>. <person> saw it and said: "
        '"That <item> belongs to <pal=name> of <far=town>." So <hero> <went> to <far> with the <item>. <ending>',
        "<opening> <when>, <hero> lost a <quality> <item=thing> <spot>. <their> friend <pal=name>, a <mood> <animal>, "
        "looked <spot> and found <goods> and <goods>, but no <item>. <ending>",
    ],
    "guest": [
        "<when>, a <mood> <guest=animal> knocked at the door of <hero>, a <trade> from <home=town>. "
        '"I am <pal=name>," said the <guest>. "Have you seen my <quality> <item=thing>?" They looked <spot>, and they '
        "found the <item> <spot>, next to <goods>. <ending>",
    ],
    "barter": [
        "<opening> <they> had a <quality> <item=thing> and wanted a <wish=thing>. <pal=name> the <mood> <trade> had a "
        "<quality> <wish> and wanted <fare=food>. So <hero> <went> to <far=town>, sold the <item> for <count> <fare>, and "
        "came home with the <wish> and <goods>.",
    ],
    "contest": [
        "Every <day> the people of <home=town> compete in <art=pastime>. <hero> the <mood> <trade> met <pal=name> the "
        "<mood> <trade>, and <person> gave the winner a <quality> <prize=thing>. <they> won the <prize> with <goods> "
        "and taught <pal> <art>. <ending>",
    ],
    "journey": [
        "<opening> <they> took <goods>, <goods> and a <item=thing> and <went> to <land>. <spot>, <person> stole the "
        "<item>, but in <capital> <they> ate <dish> by the river <river>, bought <goods> and met <person> <pastime> with <name>.",
    ],
    # other plain texts
    "fact": [
        "<land> lies between <town> and <town>. Its capital is <capital>, on the <mood> river <river>, and its flag "
        "shows a <beast> with a <thing>. People there are <mood>, love <pastime> and eat <dish> with <food>.",
        "The river <river> flows through <capital>, the capital of <land>. <when>, <hero> the <trade> came there with "
        "<goods> and saw a flag with a <beast> <spot>. Since then <they> eats <dish> with <quality> <food>.",
    ],
    "shop": [
        "<hero> the <mood> <trade> sells <goods>, <goods>, a <thing> for <pastime>, <goods> and a <mood> <animal> named <name>.",
        "In the shop <spot>, <hero> sells <goods> to <person> and <goods> to <person>.",
    ],
    "letter": [
        "Dear <pal=name>,\n<home=town> is <weather> and <mood>. Yesterday I met a <mood> <animal> <spot>, <pastime> with "
        "<goods>. Send me my <quality> <item=thing> and <goods>. Without the <item> I am only good at <pastime>.\n"
        "Your <mood> <hero>",
    ],
    "diary": [
        "<day>: <weather>. Met <name>, a <mood> <trade>. Ate <food> <spot>.\n<day>: <weather>. Bought <goods> and "
        "<goods>. <name> is <mood>.\n<day>: <weather>. <pastime> with <name> and a <mood> <animal>.",
    ],
    "feast": [
        "To the feast in <home=town> came <hero> with <goods>, <name> the <trade> with <goods>, <name> the <trade> "
        "with <goods>, and <hero>'s <mood> <animal> with a <thing>. They ate <food>, <food> and <quality> <food>.",
    ],
    "notice": [
        "LOST: a <quality> <item=thing>, <spot>. Reward: <goods>. Bring the <item> to <hero> the <trade> in <town>.",
        "WANTED: a <mood> <job=trade> who likes <pastime>, for <hero>, <town>. We pay <count> <food> and <goods> every "
        "<day>. No <job> with a <animal>!",
    ],
    "pantry": [
        "<hero> the <trade> had <a> <quality> <fare=food>. <pal=name> brought <b> more, and now there were <sum>. Then a "
        "<mood> <animal> ate <a> of the <fare>, and <b> were left for <person> and <person>.",
    ],
    "rhyme": [
        "This is the <quality> <item=thing> of <hero>.\n"
        "This is the <mood> <pet=animal> that <did=deed> the <item> of <hero>.\n"
        "This is the <mood> <job=trade> that <done=deed> the <pet> that <did> the <item> of <hero>.\n"
        "This is <pal=name> of <town>, who <deed> the <job> that <done> the <pet> that <did> the <item> of <hero>.",
    ],
    "completion": [
        "<story>",
        "<story>",
        "<rhyme>",
        "<diary>",
        "<shop>",
        "<letter>",
        "<feast>",
        "<notice>",
        "<fact>",
        "<pantry>",
    ],
    "aside": ["I met <person> there <pastime>.", "I bought <goods> there.", "It is <weather> and <mood> there."],
}

# Dialogues: a topic is a list of exchanges (question, answer), asked from the first on.
TOPICS: dict[str, list[list[tuple[str, str]]]] = {
    "request": [
        [
            ("Tell me a story about <hero>, a <job=trade> from <home=town>.", "<story>"),
            ("And then?", "<when>, <hero> met <person> <spot>, and they went <pastime> with <goods>."),
        ],
        [
            ("What does <hero> the <trade> sell?", "<shop>"),
            ("I would like something else, <hero>.", "Then take <goods>, <goods> or a <thing> for <pastime>."),
        ],
        [
            ("Please write to <pal=name> from <home=town>.", "<letter>"),
            ("And what will <pal> answer?", "<pal> will send <goods> and a <mood> <animal> named <name>."),
        ],
        [
            ("My <mood> <pet=animal> needs a name.", "Call it <name>, or <name> if it likes <pastime>."),
            ("And what does a <pet> eat?", "Give the <pet> <count> <food>, <quality> <food> and never <food>."),
            ("Where should it sleep?", "A <pet> sleeps <spot>, in a <quality> <thing>."),
        ],
        [
            ("I am <feeling=mood>. What should I do?", "Go <pastime> <spot> with <person> and <goods>."),
            ("I am still <feeling>.", "Then eat <count> <quality> <food>, buy a <thing> and visit <name> in <town>."),
        ],
    ],
    "memory": [
        [
            (
                "Remember this: <first=goods>, <second=goods>, <third=goods> and <pal=name>. What did I say?",
                "You said: <first>, <second>, <third> and <pal>.",
            ),
            ("What came after <second>?", "After <second> came <third>."),
            ("And what came before?", "Before <second> came <first>."),
        ],
        [
            (
                "<first=name> wants <one=goods>, <second=name> wants <two=goods>, and <third=name> wants <three=goods>.",
                "So <one> for <first>, <two> for <second> and <three> for <third>. And for you? Perhaps <goods>?",
            ),
            ("What does <third> want?", "<third> wants <three>."),
            ("And <first>?", "<first> wants <one>."),
        ],
    ],
    "persona": [
        [
            ("Who are you?", "I am <hero>, the <job> of <home>, and this is <name>, my <mood> <animal>."),
            ("What is new, <hero>?", "I saw <person> <spot>, <pastime> with <goods>."),
            ("What is in your bag?", "<goods>, <goods> and a <thing> for <pastime>."),
        ],
        [
            ("What do you sell?", "I sell <ware>, <quality> and <quality>, and I have <sum> of them."),
            ("I take <a>.", "Then I have <b> <ware> left for <person>. Would you like <goods>?"),
            ("Where do you live?", "I live in <home>, <spot>, with <goods>."),
        ],
    ],
    "reading": [
        [
            (
                "<hero> hid a <look=quality> <item=thing> <hideout=spot>. <pal=name> the <trade> hid <goods> <spot>. "
                "Where is the <item>?",
                "The <item> is <hideout>, guarded by a <mood> <animal>.",
            ),
            ("What does it look like?", "It is a <look> <item>, made by <person>."),
        ],
        [
            (
                "<hero> is a <mood> <job=trade> from <home=town>. <pal=name> is a <trade> with a <nature=mood> <pet=animal>. "
                "What does <hero> do?",
                "<hero> is a <job> and loves <pastime>.",
            ),
            ("Who owns the <pet>?", "The <nature> <pet> belongs to <pal>, who also has <goods>."),
        ],
    ],
    "sum": [
        [
            (
                "<hero> the <trade> has <a> <fare=food> and buys <b> more <spot>. How many are there?",
                "<a> plus <b> is <sum>, so <hero> has <sum> <fare>, enough for <person> and <person>.",
            ),
            ("A <mood> <animal> eats <a> of them.", "<sum> minus <a> is <b>, so <b> <fare> are left, and <goods>."),
        ],
    ],
    "land": [
        [
            (
                "I go to <land> with <goods>. What is the capital?",
                "The capital of <land> is <capital>. <aside>",
            ),
            ("Which river is there?", "The river <river> flows through <land>. <aside>"),
        ],
        [
            (
                "<name> the <trade> asks what people eat in <land>.",
                "In <land> they eat <dish> with <food> and <quality> <food>.",
            ),
            ("And the flag?", "The flag of <land> shows a <beast> with a <quality> <thing>."),
        ],
    ],
}

PERSONA = "You are <hero>, a <mood> <job=trade> in <home=town>. You have <sum> <ware=food> and <goods>."
STYLES = [  # (system turn, how it shapes every answer)
    ("You are <name>, a <mood> <animal>.", "{}"),
    ("Talk like a <mood> pirate.", "Arr! {}"),
    ("You are a grandmother.", "My dear! {} Now eat <quality> <food>."),
    ("End with an animal.", "{} Also, a <mood> <animal>."),
    ("Begin with a wish.", "May your <thing> be <quality>! {}"),
]


class Teller:
    """Tells one sample: fills templates and remembers who and what was named."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        self.memory = {"a": str(a), "b": str(b), "sum": str(a + b)}
        self.memory.update(zip(("land", "capital", "river", "beast", "dish"), self.pick(words.LANDS), strict=True))
        woman = rng.random() < 0.5
        self.memory["hero"] = self.pick(words.WOMEN if woman else words.MEN)
        self.memory["they"], self.memory["their"] = ("she", "her") if woman else ("he", "his")

    def pick(self, choices: Sequence[T]) -> T:
        """Draw one, early ones more often: the first quarter of them has 33 % of the mass."""
        return choices[int(len(choices) * self.rng.random() ** 1.25)]

    def fill(self, template: str) -> str:
        """Fill every slot of a template, from left to right."""

        def slot(match: re.Match[str]) -> str:
            alias, rule = match.groups()
            if (alias or rule) in self.memory:
                return self.memory[alias or rule]
            text = self.fill(self.pick(RULES[rule]))
            while alias and text in self.memory.values():  # no two characters share a name
                text = self.fill(self.pick(RULES[rule]))
            if alias:
                self.memory[alias] = text
            return text

        return SLOT.sub(slot, template)

    def tell(self, template: str) -> str:
        """Fill a template and mend the English: "a owl" and small letters after a full stop."""
        text = re.sub(r"\b([Aa]) (?=[aeio]|umb|ump|ugl)", r"\1n ", self.fill(template))
        return re.sub(r"(?:^|[.!?] )[a-z]", lambda match: match.group().upper(), text)

    def dialogue(self) -> Turns:
        """One to three questions and answers on one topic, under a system turn or none: (role, content) pairs."""
        topic = self.pick(list(TOPICS))
        style = "{}"
        turns = []
        if topic == "persona":
            turns.append(("system", self.tell(PERSONA)))
        elif self.rng.random() < 0.5:
            system, style = self.pick(STYLES)
            turns.append(("system", self.tell(system)))
        exchanges = self.pick(TOPICS[topic])
        for question, answer in exchanges[: self.rng.randint(1, len(exchanges))]:
            turns += [("user", self.tell(question)), ("assistant", self.tell(style.format(answer)))]
        return turns


def openai_row(turns: Turns) -> Row:
    """The conversation as a row of OpenAI's ``messages``."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def sharegpt_row(turns: Turns) -> Row:
    """The conversation as a row of ShareGPT, its system turn in ``init``."""
    names = {"user": "human", "assistant": "gpt"}
    init = "".join(content for role, content in turns if role == "system")
    said = [{"from": names[role], "value": content} for role, content in turns if role != "system"]
    return {"init": init, "conversations": said}


def samples(seed: int) -> Iterator[Turns | str]:
    """Different samples without end: completions (str) and dialogues (turns)."""
    rng = random.Random(seed)
    told = set()
    while True:
        teller = Teller(rng)
        sample = teller.tell("<completion>") if rng.random() < 0.5 else teller.dialogue()
        if (key := str(sample)) not in told:
            told.add(key)
            yield sample


def row(sample: Turns | str, number: int) -> Row:
    """The sample as a dataset row; the number of the sample chooses between the two usual forms."""
    if isinstance(sample, str):
        completion = {"init": "", "conversations": [{"from": "human", "value": sample}], "tags": ["completion"]}
        return completion if number % 2 else {"text": sample}
    return sharegpt_row(sample) if number % 2 else openai_row(sample)


def jsonl(chosen: list[Turns | str]) -> str:
    """The text of a dataset file: one JSON row a line."""
    return "".join(json.dumps(row(sample, number)) + "\n" for number, sample in enumerate(chosen))
