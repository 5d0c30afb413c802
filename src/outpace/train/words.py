"""What composed prompts are about: lists of our own that fill the slots of the tasks in tasks.py.

A slot `{name}` takes one entry of the list of that name; entries may have slots themselves.
"""

from __future__ import annotations

from .snippets import WITH_BUGS, WITHOUT


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", " ").split(";") if part.strip())


WORDS: dict[str, tuple[str, ...]] = {
    "topic": _list(
        """photosynthesis; black holes; the water cycle; plate tectonics; how vaccines work; the human heart; how
        bees make honey; the moons of Jupiter; ocean currents; how planes stay in the air; volcanoes; coral reefs;
        the immune system; how batteries store energy; magnets; rainbows; earthquakes; the food chain; how the
        brain stores memories; DNA; evolution; gravity; the speed of light; nuclear power; solar panels; wind
        turbines; electric cars; how the internet works; how a search engine works; encryption; machine learning;
        neural networks; how computers store numbers; operating systems; databases; cloud computing; open source
        software; 3D printing; how GPS works; blockchains; the Roman Empire; the French Revolution; the Silk Road;
        the printing press; the Industrial Revolution; the Cold War; ancient Egypt; the Vikings; the Aztecs; the
        Renaissance; the history of tea; the history of chess; the moon landing; the Great Wall of China; the
        history of writing; how democracies work; inflation; supply and demand; interest rates; how insurance
        works; the stock market; taxes; trade between countries; how a bank makes money; budgets for families;
        jazz; classical music; how a guitar makes sound; watercolour painting; photography; film editing; poetry;
        haiku; ballet; street art; architecture; Shakespeare; fairy tales; detective novels; science fiction; how
        to write a novel; sleep; healthy breakfasts; running for beginners; yoga; stretching; stress; headaches;
        vitamins; sugar; caffeine; drinking enough water; back pain; meditation; first aid; allergies; the common
        cold; teeth; eyesight; ageing; baking bread; making pasta; roasting vegetables; knives in the kitchen;
        spices; fermenting cabbage; chocolate; cheese; coffee beans; soups; vegetarian cooking; food storage;
        cooking rice; making jam; grilling fish; growing tomatoes; compost; house plants; roses; lawns; pruning
        apple trees; garden birds; hedgehogs; earthworms; dogs; cats; parrots; horses; goldfish; wolves; whales;
        dolphins; elephants; penguins; spiders; ants; butterflies; bats; owls; sharks; turtles; frogs; dinosaurs;
        mammoths; forests; deserts; glaciers; rivers; islands; mountains; climate change; recycling; plastic in
        the sea; air pollution; noise; saving energy at home; public transport; bicycles; trains; ships; bridges;
        tunnels; lifts; clocks; calendars; maps; languages; alphabets; sign language; learning vocabulary; exams;
        homework; teaching; reading aloud; public speaking; job interviews; working from home; meetings; teamwork;
        leadership; time management; procrastination; habits; motivation; friendship; politeness; moving to
        another city; renting a flat; buying a used car; travelling alone; camping; hiking; swimming; football;
        basketball; tennis; table tennis; skiing; climbing; judo; the Olympic Games; board games; card games;
        puzzles; magic tricks; origami; knitting; sewing; pottery; woodwork; painting a room; fixing a tap;
        changing a tyre; tools; fire; glass; steel; paper; rubber; gold; diamonds; oil; soap; perfume; colours;
        sound; echoes; shadows; mirrors; probability; prime numbers; fractions; percentages; triangles; circles;
        negative numbers; zero; infinity; statistics"""
    ),
    "things": _list(
        """cats and dogs; tea and coffee; trains and planes; books and films; cities and villages; butter and
        margarine; rivers and canals; viruses and bacteria; alligators and crocodiles; weather and climate; mass
        and weight; Python and JavaScript; lists and tuples; stacks and queues; TCP and UDP; RAM and hard disks;
        threads and processes; SQL and NoSQL databases; HTTP and HTTPS; Git and Subversion; compilers and
        interpreters; classes and objects; arteries and veins; comets and asteroids; stars and planets; frogs and
        toads; moths and butterflies; renting and buying; saving and investing; stocks and bonds; debit cards and
        credit cards; gross and net pay; pop and rock; oil paint and watercolour; novels and short stories;
        metaphors and similes; drama and comedy; yoga and pilates; walking and running; swimming and cycling;
        football and rugby; chess and draughts; gas cookers and electric cookers; baking and roasting; olive oil
        and sunflower oil; jam and marmalade; paper books and e-readers; phones and tablets; laptops and desktop
        computers; email and letters; solar power and wind power; petrol cars and electric cars; buses and trams;
        hotels and campsites; speed and velocity; heat and temperature; acids and bases; metals and plastics;
        atoms and molecules; republics and monarchies; parliaments and courts; laws and customs; facts and
        opinions; fruit and vegetables"""
    ),
    "person": _list(
        """a child of eight; a teenager; a grandmother; a new colleague; a student in the first year; a busy manager;
        a visitor from abroad; someone without any background; an engineer; a nurse; a school class; a beginner; a
        customer; a curious friend; a reader of a local newspaper; someone who is in a hurry; a group of tourists"""
    ),
    "name": _list(
        """Amelie; Bruno; Clara; David; Elif; Farid; Greta; Hugo; Ines; Jonas; Kira; Leo; Mina; Noah; Olga; Pablo;
        Quinn; Rosa; Samir; Tilda; Ulrich; Vera; Wanda; Xavier; Yusuf; Zoe; Maya; Ethan; Grace; Henry; Isla; Jack;
        Nora; Owen"""
    ),
    "animal": _list(
        """a fox; a dragon; a mouse; an old dog; a crow; a snail; a young bear; a cat who can count; a whale; a goat;
        a hedgehog; a lost penguin; a wolf; a robot bird; a spider; a tired horse; an owl; a rabbit; a turtle; a
        frog"""
    ),
    "place": _list(
        """a small village by the sea; a space station; a forest in winter; a busy market; an old library; a desert
        town; a school on a hill; a train at night; a bakery; an island without a name; a castle; a big hospital;
        a farm; a harbour; the top floor of a tower; a mountain hut; an underground city; a quiet museum; a
        circus; a garden"""
    ),
    "city": _list(
        """Lisbon; Vienna; Kyoto; Dublin; Prague; Oslo; Naples; Seville; Hamburg; Montreal; Boston; Cairo; Istanbul;
        Lima; Bergen; Krakow; Athens; Edinburgh; Marseille; Ghent; Porto; Zurich; Hanoi; Seoul; Melbourne;
        Nairobi; Chicago"""
    ),
    "goal": _list(
        """learn to cook; run ten kilometres; save money for a bicycle; read more books; learn Spanish; sleep better;
        write a diary; learn the piano; repair my old bike; plant a vegetable garden; find new friends; eat less
        sugar; get over a cold; prepare for an exam; tidy my flat; give a good talk; start a small shop; learn to
        draw; build a website; learn to program; spend less time on my phone; train my dog; plan a wedding; write
        a CV; move house; make a family budget; teach my daughter to swim; become a better listener; learn
        photography; start a book club; organise my photos; pass the driving test; get fit after an injury; drink
        more water"""
    ),
    "event": _list(
        """a birthday party for ten children; a picnic; a school trip; a dinner for six guests; a film night; a
        garden party; a small concert; a team meeting; a workshop; a farewell party; a charity run; a weekend with
        old friends; a science fair; a flea market; a family reunion; a reading evening; a barbecue; a surprise
        for my sister"""
    ),
    "dish": _list(
        """lentil soup; apple pie; mushroom risotto; fried rice; pancakes; a potato salad; tomato sauce; banana
        bread; a bean stew; vegetable curry; an omelette; roasted carrots; oat biscuits; cheese scones; fish
        tacos; onion tart; pumpkin soup; noodle salad; stuffed peppers; rice pudding; chicken with lemon; a
        chocolate cake; garlic bread"""
    ),
    "food": _list(
        """eggs; rice; potatoes; tomatoes; spinach; chickpeas; bread; cheese; apples; carrots; onions; pasta;
        yoghurt; lentils; tuna; mushrooms; beans; oats; bananas; peppers; cabbage; sweetcorn; tofu; lemons; nuts;
        peas"""
    ),
    "product": _list(
        """a water bottle that keeps tea hot; a folding bike; a desk lamp; wireless earphones; a backpack for hikers;
        a coffee grinder; a raincoat; a board game about trains; a plant that needs little water; a phone case; a
        cookery book; an app that counts steps; a language course; a wooden toy; running shoes; a soft blanket; a
        pocket knife; a notebook with squared paper; a robot that mows the lawn; a tent for two; a kitchen scale"""
    ),
    "job": _list(
        """a nurse; a software developer; a carpenter; a teacher; a shop assistant; a bus driver; an accountant; a
        chef; a librarian; a gardener; a designer; a receptionist; a data analyst; an electrician; a translator; a
        journalist"""
    ),
    "reason": _list(
        """the parcel arrived damaged; the train was two hours late; I was charged twice; the room was not clean; the
        shoes are the wrong size; the heating does not work; the course was cancelled; my order never came; I
        cannot log in; the invoice has a mistake; the lesson has to be moved; I am ill and cannot come; I would
        like to change the appointment; the neighbours are too loud; the lift is broken again"""
    ),
    "recipient": _list(
        """my landlord; a customer; the head of my department; a hotel; my daughter's teacher; an online shop; a
        friend; the train company; my bank; a colleague; my football team; the city council; my aunt; a supplier;
        my doctor"""
    ),
    "tone": _list(
        """polite; friendly; firm but polite; cheerful; formal; short; warm; neutral; apologetic; enthusiastic; calm;
        funny"""
    ),
    "form": _list(
        """a poem; a short story; a dialogue; a limerick; a song; a letter; a speech; a fable; a diary entry; a news
        report; a riddle; a haiku; a scene for a play; a fairy tale; an advertisement; a blog post; a joke; a
        postcard"""
    ),
    "feeling": _list(
        """courage; jealousy; hope; loneliness; trust; boredom; joy; homesickness; pride; curiosity; patience; fear;
        luck; anger; kindness; gratitude; doubt; surprise"""
    ),
    "language": _list("French; German; Spanish; Italian; Portuguese; Dutch"),
    "sentence": _list(
        """Where is the nearest pharmacy?; The shop opens at {hour} on Sundays.; I would like to book a table for
        {small} people.; {name} has forgotten the keys again.; The weather in {city} was better than we expected.;
        My sister lives in {city} and works as {job}.; We missed the bus because the alarm did not ring.; Can you
        help me carry this table?; The soup is too salty, but the bread is good.; I have lived here for {small}
        years.; How much does this jacket cost?; Please send me the report before Friday.; {name} bought {small}
        apples and a bottle of milk.; The children are playing in the garden.; If it rains tomorrow, we will stay
        at home.; I did not understand the question.; The museum is closed on Mondays.; He sings while he washes
        the dishes.; They want to move to {city} next year.; What time does the last train leave?; My grandfather
        told us about {topic}.; She is reading a book about {topic}.; The dog is afraid of thunder.; I have an
        appointment with the dentist at {hour}.; There is a mistake in the bill.; Turn left after the church and
        go straight on.; {name} and {name} have known each other since school.; The film was long, but I liked the
        ending.; Do you have this shirt in a bigger size?; Nobody answered the phone."""
    ),
    "broken": _list(
        """he dont know where is the station; me and {name} was going to {city} last week; the informations are to
        old for use it; she have {small} cats and a dogs; i am living here since {small} years; yesterday we goes
        in the cinema; their are many peoples in the market on sunday; if i would have time i will learn about
        {topic}; the childs plays outside becaus the weather is good; can you explain me how works this machine;
        {name} said me that he come at {hour}; i look forward to hear from you soon; it depends of the price; we
        discussed about {topic} yesterday; the most easy way is to going by bus; this are the book what i like
        most; he is more taller then his brother"""
    ),
    "small": _list("2; 3; 4; 5; 6; 7; 8; 9; 10; 12; 14; 15; 16; 18; 20"),
    "medium": _list("24; 25; 30; 32; 35; 36; 40; 42; 45; 48; 50; 54; 56; 60; 63; 64; 70; 72; 75; 80; 84; 90; 96"),
    "large": _list("100; 110; 125; 130; 144; 150; 160; 175; 180; 200; 225; 240; 250; 275; 300; 320; 350; 400; 500"),
    "percent": _list("5; 10; 12; 15; 20; 25; 30; 35; 40; 50; 60; 75; 80"),
    "hour": _list("seven; half past seven; eight; a quarter past eight; nine; half past nine; noon; four; five"),
    "goods": _list("pencils; tickets; bottles; chairs; books; eggs; stamps; shirts; plants; cakes; tiles; marbles"),
    "code_language": _list("Python; Python; Python; JavaScript; Java; C; C++; Go; Rust; TypeScript; Ruby; PHP; C#"),
    "function": _list(
        """reverses a string; checks whether a word is a palindrome; counts the vowels in a text; finds the largest
        number in a list; computes the factorial of a number; returns the first n Fibonacci numbers; removes
        duplicates from a list; sorts a list of names by length; checks whether a number is prime; converts
        Celsius to Fahrenheit; counts how often each word occurs; finds the common elements of two lists; computes
        the average of a list; flattens a nested list; swaps two variables; reads a CSV file; writes a dictionary
        to a JSON file; finds the longest word; computes the greatest common divisor; checks whether brackets are
        balanced; converts a number to binary; adds two matrices; searches a sorted list by bisection; sorts a
        list with bubble sort; sorts numbers with quicksort; validates an email address; counts the lines of a
        file; splits a list into chunks; rounds a price; generates a random password; parses a date; computes the
        distance between two points; finds missing numbers in a range; merges two dictionaries; turns a sentence
        into title case; counts the days between two dates; draws a triangle of stars; plays rock, paper,
        scissors; computes compound interest; looks up a word in a dictionary; reverses the words of a sentence;
        checks for anagrams; deletes empty lines from a text; finds the second largest value; sums the digits of a
        number; rotates a list by k places; encodes a text with the Caesar cipher; keeps a shopping list; counts
        down from ten; prints a times table"""
    ),
    "concept": _list(
        """recursion; a for loop; a while loop; a dictionary; a linked list; a hash table; inheritance; an interface;
        a closure; a decorator; a generator; exceptions; unit tests; a pointer; garbage collection; a binary tree;
        big O notation; a regular expression; an API; JSON; a lambda function; list comprehensions; a virtual
        environment; a git branch; a merge conflict; a primary key; an index in a database; a join in SQL; a
        cookie; a REST endpoint; a thread; a deadlock; caching; a compiler; a class; a variable; scope; a stack; a
        queue; a graph; dynamic programming; an event loop; async and await; a Docker container; a makefile; type
        hints; a constructor; a static method; a tuple"""
    ),
    "shell": _list(
        """find all files larger than 100 MB; count the lines of every text file; copy a folder to another computer;
        see which process uses the most memory; search for a word in many files; compress a folder; show the last
        lines of a log; change the owner of a file; list files by date; delete files older than a week; download a
        web page; check free disk space; kill a process; add a user; make a script executable; compare two files;
        schedule a job every night"""
    ),
    "code": WITH_BUGS,
    "good_code": WITHOUT,
    "system": _list(
        """You are a patient teacher.; You answer in short sentences.; You are a helpful assistant who likes
        examples.; You are an experienced programmer. Keep code simple.; You are a friendly travel guide.; Answer
        briefly.; You are a careful editor.; You are a cheerful cook.; You explain things step by step.; You are a
        maths tutor.; Always answer with a numbered list.; You are a librarian who loves questions.; You speak
        plainly and avoid jargon."""
    ),
    "follow": _list(
        """Can you make that shorter?; Give me an example.; Why is that?; Explain the second point again, please.;
        Thanks! Can you put it into a table?; Now write it for a child.; What should I do first?; Is there a
        cheaper way?; Could you say that in simpler words?; What are the risks?; And what if I have only one
        hour?; Please turn this into a checklist.; Which of these is the most important?; Tell me more about the
        last part.; Are you sure about that?; How do I begin?; Summarise your answer in one sentence.; Can you add
        two more ideas?; What would an expert say?; Make it funnier."""
    ),
}  # fmt: skip
