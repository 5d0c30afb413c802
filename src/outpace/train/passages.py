"""Passages to summarise, edit and ask about, composed of sentences of our own.

A kind is a list of places for a sentence, each with a few to choose from, so that hardly two passages are the same.
"""

from __future__ import annotations

# Slots as in words.py. A passage takes one sentence of every group, in order; a group may hold "" to be left out.
PASSAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "news": (
        (
            "The council of {city} has decided to build a new swimming pool.",
            "A storm on Saturday night left {large} homes near {city} without power.",
            "The old theatre in {city} will open again after {small} years of repairs.",
            "Farmers around {city} report the best harvest of apples in {small} years.",
            "A bridge in the north of {city} was closed on Thursday after engineers found cracks.",
            "The university of {city} is looking for {large} volunteers for a study about {topic}.",
        ),
        (
            "According to the mayor, {name} Berger, the plan has been discussed since last spring.",
            "Nobody was hurt, a spokesman said.",
            "The costs are estimated at {medium} million.",
            "Many residents were surprised by the announcement.",
            "{name} Lang, who lives nearby, called it the best news of the year.",
        ),
        (
            "Work is expected to begin in {small} weeks.",
            "About {percent} percent of the money comes from the state.",
            "A petition against it has been signed by {large} people.",
            "Experts warn that prices could rise by {percent} percent.",
            "Buses will run every {small} minutes until then.",
            "",
        ),
        (
            "Similar projects in {city} and {city} have taken longer than planned.",
            "The fire brigade was busy until the morning.",
            "Shops in the area hope for more visitors.",
            "Schools have been asked to tell parents.",
            "",
        ),
        (
            "A public meeting will be held next month.",
            "More details will be published on Monday.",
            "The opposition wants to vote on it again.",
            "Tickets can be bought from {hour} on.",
        ),
    ),
    "email": (
        ("Hi {name},", "Dear {name},", "Hello {name},", "Dear team,"),
        (
            "thank you for your call about {event}.",
            "I hope you had a good trip to {city}.",
            "I am writing because {reason}.",
            "we have finished the first version of the report about {topic}.",
            "as you know, {name} will leave us at the end of the month.",
        ),
        (
            "We now have {small} people who would like to take part.",
            "The costs went up by {percent} percent, mostly because of the rent.",
            "Two chapters are still missing, and the pictures are too small.",
            "The customer in {city} has asked for an offer before Friday.",
            "I have spoken to {name}, who can help on Tuesday and Wednesday.",
        ),
        (
            "Could you please check the numbers and send them back to me?",
            "Please tell me which day suits you best.",
            "Maybe we can meet at {hour} and talk about it.",
            "If nobody objects, I will order {medium} {goods} tomorrow.",
            "",
        ),
        (
            "The key is with the caretaker.",
            "I will be away from Monday to Wednesday.",
            "The last invoice has been paid.",
            "",
        ),
        ("Best wishes, {name}", "Kind regards, {name}", "See you soon, {name}", "Many thanks, {name}"),
    ),
    "science": (
        (
            "Bats find their way in the dark by listening to the echo of their own calls.",
            "Trees move water from their roots to their leaves without any pump.",
            "The moon pulls at the oceans and makes the water rise and fall twice a day.",
            "Honey hardly ever spoils, because it holds too little water for bacteria.",
            "Lightning is an electric current that jumps between clouds or from a cloud to the ground.",
            "Migrating birds travel thousands of kilometres and still find the same roof in spring.",
            "Rust forms when iron meets water and oxygen.",
            "Yeast eats sugar and breathes out the gas that lets dough rise.",
        ),
        (
            "For a long time nobody could explain how this works.",
            "The idea is simple, but the details took researchers {medium} years.",
            "A teacher from {city} noticed it first, while looking at something else.",
            "This can be seen in a small experiment with a glass and a little patience.",
        ),
        (
            "In a study with {large} samples, the effect was {percent} percent stronger at night.",
            "Temperature plays a part: when it is warm, everything goes faster.",
            "The smallest change in pressure is enough to disturb it.",
            "Some animals have learned to use this to their advantage.",
            "",
        ),
        (
            "Engineers have copied the trick for sensors and small motors.",
            "Farmers have used it for centuries without knowing why.",
            "It also helps doctors to find illnesses earlier.",
            "There is even a festival for it in {city}.",
        ),
        (
            "Many questions are still open.",
            "The next step is to test it outside the laboratory.",
            "Whether it also works on other planets is not known.",
            "Children love to try it at home.",
        ),
    ),
    "story": (
        (
            "{name} had never liked {place}.",
            "On the last day of summer, {name} found a letter under the door.",
            "{animal}, so people say, once lived in {place}.",
            "Nobody in {place} remembered when the clock had stopped.",
            "When {name} was {small}, the circus came to {city}.",
        ),
        (
            "But that morning everything was quiet, and the air smelled of rain.",
            "It was an old promise that brought them there.",
            "There were {small} chairs around the table, and one was empty.",
            "{name} laughed about it, as always.",
        ),
        (
            "Then {name} saw a light between the trees and forgot to be afraid.",
            "A stranger asked for water and paid with a golden button.",
            "In the box lay a map, a key and {small} dry leaves.",
            "At {hour} the bell rang, although there was no bell.",
        ),
        (
            "They walked until the road ended.",
            "Nobody wanted to be the first to speak.",
            "{feeling} is a strange guest, {name} thought.",
            "Behind the wall somebody was singing.",
            "",
        ),
        (
            "From then on the door was never locked again.",
            "The next day there was snow on the roofs, and nobody asked any questions.",
            "And if you go there today, you can still hear it.",
            "{name} kept the button for the rest of her life.",
        ),
    ),
    "review": (
        (
            "We stayed in this hotel in {city} for {small} nights.",
            "I ordered {product} for my brother.",
            "Last week we had dinner at the new restaurant next to the station.",
            "I took this course because I wanted to {goal}.",
        ),
        (
            "At first I was not sure whether it was worth the money.",
            "Everybody was friendly and took time for us.",
            "It arrived {small} days late, and the box was open.",
            "A friend had told me about it.",
        ),
        (
            "The best thing is how quiet it is.",
            "What I liked most was the {dish}.",
            "It does exactly what it promises, and nothing more.",
            "After {small} days the first part broke.",
            "The instructions are short and easy to follow.",
        ),
        (
            "The price of {medium} is fair.",
            "For {large} I would have expected more.",
            "Only the colour is different from the picture.",
            "They gave us {percent} percent off when we complained.",
            "",
        ),
        (
            "I would buy it again.",
            "We will not come back.",
            "All in all I can recommend it, with one star less for the noise.",
            "My {small} out of 20 points.",
        ),
    ),
    "howto": (
        (
            "To repair a flat tyre you need a patch, glue and two levers.",
            "A good soup begins with onions and time.",
            "Before you paint a wall, take everything off it and wash it.",
            "Seeds of tomatoes should be sown at the end of winter.",
            "If you want to {goal}, begin with small steps.",
        ),
        (
            "Take {small} minutes to put everything ready.",
            "Work slowly, and do not skip anything.",
            "Ask somebody to help you the first time.",
            "Most mistakes are made in a hurry.",
        ),
        (
            "Wait at least {medium} minutes before you go on.",
            "Repeat this {small} times.",
            "Keep the rest in a dry place.",
            "Use half of it now and the other half tomorrow.",
            "",
        ),
        (
            "You will see the difference after {small} days.",
            "It costs less than {medium}, and most of it can be used again.",
            "If it does not work, start again from the beginning.",
            "Do not worry when it looks odd at first.",
        ),
    ),
}
