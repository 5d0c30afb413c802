"""What composed prompts ask for: tasks by kind, with slots as in words.py; {passage} is one of passages.py."""

from __future__ import annotations


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip().replace("\\n", "\n") for line in text.strip().splitlines())


# kind -> (weight, tasks)
TASKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "explain": (5, _lines("""
        Explain {topic}.
        Explain {topic} to {person}.
        What is the most important thing to know about {topic}?
        Tell me about {topic}.
        Can you tell me something surprising about {topic}?
        What do beginners often get wrong about {topic}?
        Give me a short introduction to {topic}.
        Give me {small} facts about {topic}.
        Why does {topic} matter?
        I have to give a talk about {topic}. Which points should I cover?
        Describe {topic} in two paragraphs.
        How would you teach {topic} to {person}?
        What questions could a teacher ask about {topic}?
        What are common myths about {topic}?
        How has our view of {topic} changed over time?
        List the pros and cons of {topic}.
        Which words do I need when I talk about {topic}?
        Where can I learn more about {topic}, and how do I begin?
        What has {topic} to do with {topic}?
        hi, can you help me understand {topic}?
        whats {topic} in simple terms
        I don't understand {topic} at all. Please start from the beginning.""")),
    "compare": (3, _lines("""
        Compare {things}.
        What is the difference between {things}?
        Explain the difference between {things} to {person}.
        {name} asks me to choose between {things}. What would you say?
        Make a table that compares {things}.
        What do {things} have in common?
        Which is better for {person}, if you think of {things}?
        When should I use which: {things}?""")),
    "advice": (4, _lines("""
        How can I {goal}?
        I want to {goal}. What should I do first?
        Give me {small} tips to {goal}.
        Make a plan for {small} weeks that helps me to {goal}.
        I have tried to {goal} and failed. What now?
        What does it cost to {goal}, roughly?
        Help me plan {event}.
        Make a checklist for {event}.
        What do I need for {event}, and who should do what?
        Plan a weekend in {city} for {person}.
        What should I see in {city} if I have only {small} hours?
        I am going to {city} with {small} friends. What could we do when it rains?
        I have {food}, {food} and {food}. What can I cook?
        Give me a recipe for {dish}.
        How long does {dish} keep, and how do I warm it up?
        What goes well with {dish}?
        How do I make {dish} without {food}?
        What does {job} do all day?
        How do I become {job}?
        My friend {name} is sad because of {feeling}. What could I say?
        Suggest a gift for {name}, who loves {topic}.
        Recommend three books about {topic}.""")),
    "write": (5, _lines("""
        Write {form} about {topic}.
        Write {form} about {animal} in {place}.
        Write {form} about {feeling}.
        Write {form} in which {name} meets {animal}.
        Write a story that begins in {place} and ends with {feeling}.
        Write {form} for {name}'s birthday.
        Write a {tone} email to {recipient} because {reason}.
        Write a {tone} message to {recipient}: {reason}.
        Write a {tone} invitation to {event}.
        Write a product description for {product}.
        Invent a slogan for {product}.
        Write a {tone} review of {product}.
        Write a cover letter for a job as {job}.
        Write an essay about {topic} of about {large} words.
        Write a paragraph about {topic} for {person}.
        Continue this story: {name} opened the door of {place} and saw {animal}.
        Describe {place} so that the reader can smell it.
        Write a conversation between {name} and {name} about {topic}.
        Think of {small} titles for {form} about {topic}.
        Write a welcome speech for {event}.
        Write interview questions for {job}.
        Give me {small} names for a shop that sells {goods}.""")),
    "code": (5, _lines("""
        Write a {code_language} function that {function}.
        Write a program in {code_language} that {function}.
        How do I write code in {code_language} that {function}?
        Write a {code_language} function that {function}, and explain it line by line.
        Write a test for a {code_language} function that {function}.
        Write a {code_language} script that {function} and then {function}.
        Explain {concept} in {code_language} with an example.
        What is {concept}?
        When would I use {concept} in {code_language}?
        What is the difference between {concept} and {concept}?
        Show me how to {shell} on the command line.
        Which command do I use to {shell}?
        Write a class in {code_language} for {product}.
        Design a small database for a shop that sells {goods}. Give me the tables.
        Write an SQL query that counts the {goods} sold in {city}.
        How do I learn {code_language} in {small} weeks?
        Write an HTML page about {topic} with a heading and a list.
        Give me {small} exercises about {concept}.""")),
    "debug": (3, _lines("""
        What is wrong with this code?\\n\\n{code}
        Find the bug:\\n\\n{code}
        This does not work. Why?\\n\\n```\\n{code}\\n```
        Please fix this code and say what you changed.\\n\\n{code}
        {name} wrote this. What would you improve?\\n\\n{code}
        What does this code do?\\n\\n{good_code}
        Explain this code to {person}.\\n\\n{good_code}
        Add comments to this code.\\n\\n```\\n{good_code}\\n```
        Rewrite this in {code_language}.\\n\\n{good_code}
        Write a test for this:\\n\\n{good_code}""")),
    "maths": (5, _lines("""
        What is {medium} plus {large}?
        What is {small} times {medium}?
        Calculate {large} - {medium} and then divide the result by {small}.
        What is {percent}% of {large}?
        {name} has {medium} {goods} and gives {small} of them to {name}. How many are left?
        {name} buys {small} {goods} for {small} euros each and pays with a note of {large}. How much change is there?
        A car drives {medium} km in one hour. How far does it get in {small} hours?
        A box holds {small} {goods}. How many boxes are needed for {large} {goods}?
        {small} workers need {medium} hours. How long do {small} workers need?
        The price of {product} rises from {medium} to {large}. By how many percent is that?
        {name} is {small} years older than {name}. Together they are {medium}. How old are they?
        A recipe for {small} people needs {large} g of {food}. How much is needed for {small} people?
        Solve for x: {small}x + {small} = {medium}.
        Solve for y: {medium} - {small}y = {small}.
        What is the area of a rectangle with sides of {medium} cm and {small} cm?
        What is the perimeter of a square with sides of {medium} m?
        Find the average of {small}, {medium}, {medium} and {large}.
        Is {large} divisible by {small}? Explain.
        Write {percent}% as a fraction and as a decimal number.
        A bag holds {small} red and {small} blue marbles. How likely is it to draw a red one?
        {name} saves {medium} euros a month. How much is that after {small} months, with {percent} euros as a start?
        Convert {large} minutes into hours and minutes.
        Which is larger, {small}/{medium} or {small}/{large}?
        Explain {topic} with a numerical example, please: {percent} percent of {large}.
        Invent a word problem with the numbers {small} and {medium}, and solve it.""")),
    "text": (6, _lines("""
        Summarise this text:\\n\\n{passage}
        Summarize the following in one sentence.\\n\\n{passage}
        {passage}\\n\\nWhat is this text about?
        {passage}\\n\\nTL;DR
        What are the key facts here?\\n\\n{passage}
        Read this and answer: who is involved, and what happened?\\n\\n{passage}
        Give this text a title.\\n\\n{passage}
        Rewrite this text in a {tone} tone.\\n\\n{passage}
        Make this text shorter:\\n\\n{passage}
        Correct and improve this text:\\n\\n{passage}
        Rewrite this for {person}:\\n\\n{passage}
        Turn this into bullet points.\\n\\n{passage}
        Write a reply to this: {passage}
        Is this text positive or negative? Explain your choice.\\n\\n{passage}
        Write {small} questions about this text.\\n\\n{passage}
        List all numbers in this text and what they mean.\\n\\n{passage}
        Continue this text:\\n\\n{passage}
        Here is a text. {passage} Explain it to {person}.
        Replace the name in this text by {name} and repeat it:\\n\\n{passage}
        Repeat this text, but put every sentence on its own line:\\n\\n{passage}""")),
    "edit": (2, _lines("""
        Correct this sentence: {broken}
        Fix the grammar and explain the mistakes: {broken}
        Make this sound more {tone}: {sentence}
        Say this in other words: {sentence}
        Which tense is used here? "{sentence}"
        Find the verb and the subject: {sentence}
        Make a question from this: {sentence}
        Make this longer and more interesting: {sentence}
        Find {small} words that mean the same as {feeling}.
        What is the opposite of {feeling}? Use it in a sentence.""")),
    "translate": (3, _lines("""
        Translate into {language}: {sentence}
        Translate to {language}: "{sentence}" and "{sentence}"
        How do I say this in {language}? {sentence}
        What is "{feeling}" in {language}?
        Say "{sentence}" in {language} and explain the words.
        Translate these words into {language}: {goods}, {food}, {feeling}, {food}.
        Which {language} phrases do I need for {event}?
        Write a short dialogue in {language} about {food}, with a translation.
        Teach me {small} words in {language} about {topic}.
        Translate into {language}, in a {tone} way: {sentence} {sentence}""")),
    "facts": (2, _lines("""
        What is {city} known for?
        In which country is {city}, and what language is spoken there?
        Is {city} larger than {city}?
        Who invented {product}?
        Quiz me about {topic}.
        True or false: {topic} is older than {topic}? Explain.
        Give me a definition of {feeling}.
        Sort these alphabetically: {name}, {name}, {food}, {goods}, {city}.
        Put {food}, {food} and {food} into groups and give reasons.
        Answer as JSON with the keys name, city and job: {name} works as {job} in {city}.
        Which word does not fit: {food}, {food}, {goods}, {food}?
        Reply with yes or no only: is {food} good for {person}?
        List {small} things that one finds in {place}.
        Pretend that you are {job}. What would you say about {topic}?
        Act as {animal} in {place} and greet me.""")),
}  # fmt: skip
