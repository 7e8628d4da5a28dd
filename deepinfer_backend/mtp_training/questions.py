"""What the model is asked to write about: kinds of requests, each about many things."""

from __future__ import annotations

_KINDS = (
    "What is {}?",
    "Explain {} to a child of ten.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "List five facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "How has {} changed over the last hundred years?",
    "Write an e-mail to a friend about {}.",
    "Give me advice about {}.",
    "What do most people get wrong about {}?",
    "Write the beginning of an essay about {}.",
    "Write a dialogue between two people who talk about {}.",
    "What should I ask an expert on {}?",
    "Describe {} in three sentences.",
    "Plan a weekend around {}.",
    "Write a Python function that has to do with {}.",
)
_THINGS = (
    *("gardening", "the Roman Empire", "electric cars", "learning a language", "the weather", "cooking for guests"),
    *("chess", "running", "black holes", "saving money", "trees in winter", "job interviews", "old maps", "bees"),
    *("public libraries", "jazz", "sleep", "mountain hiking", "a broken bicycle", "the human heart", "trains"),
    *("school holidays", "vaccines", "photography", "recycling", "whales", "bread", "the stock market", "robots"),
    *("a lost dog", "world maps", "democracy", "the colour blue", "coffee", "swimming", "insects", "the Vikings"),
    *("solar power", "moving house", "painting", "museums", "time zones", "a good breakfast", "volleyball", "rivers"),
    *("computer games", "friendship", "earthquakes", "the printing press", "birthdays", "glaciers", "honesty"),
    *("knitting", "the Great Wall of China", "prime numbers", "dinosaurs", "newspapers", "a small shop", "rain"),
)


def questions() -> list[str]:
    return [kind.format(thing) for thing in _THINGS for kind in _KINDS]
