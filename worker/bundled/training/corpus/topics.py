"""The topics that the demonstration model can explain, each in a few simple sentences."""

TOPICS: dict[str, str] = {
    "quantum computing": (
        "Quantum computing uses tiny particles to do many calculations at once. A normal computer "
        "uses bits that are 0 or 1. A quantum computer uses qubits, which can be both at the same "
        "time. This helps with some very hard problems, such as breaking codes or designing "
        "medicine."
    ),
    "a queue": (
        "A queue is a line in which things wait for their turn. The first one to arrive is the "
        "first one to leave. Computers use queues so that no work is lost when many requests come "
        "at once."
    ),
    "Redis": (
        "Redis is a fast database that keeps its data in memory. Programs use it to share values, "
        "to send messages and to hold queues of work. It answers in much less than a millisecond."
    ),
    "Penstock": (
        "Penstock serves large language models from a queue. Jobs wait in Redis until a worker has "
        "room for them. The worker sends the words back as they are made, and no accepted job is "
        "lost."
    ),
    "a penstock": (
        "A penstock is a pipe with a gate that brings water to a turbine. The gate decides how "
        "much water may flow. This server has the same name because it lets work flow to the "
        "machines."
    ),
    "a language model": (
        "A language model is a program that guesses the next word of a text. It has read many "
        "examples and learned which words follow each other. By guessing one word after another it "
        "can write a whole answer."
    ),
    "a neural network": (
        "A neural network is a program that learns from examples. It is made of many small numbers "
        "that work together, a bit like cells in a brain. With every example the numbers change a "
        "little, until the answers are right."
    ),
    "machine learning": (
        "Machine learning means that a computer learns from examples instead of fixed rules. It "
        "looks at many pictures or texts and finds patterns. Then it uses the patterns to make "
        "good guesses about new things."
    ),
    "artificial intelligence": (
        "Artificial intelligence is the work of making machines that seem to think. Such machines "
        "can read, talk, plan and recognise pictures. Most of them learn from a very large number "
        "of examples."
    ),
    "a computer": (
        "A computer is a machine that follows instructions very quickly. It can add numbers, store "
        "texts and show pictures. A program tells the computer what to do, step by step."
    ),
    "the internet": (
        "The internet is a huge network that connects computers around the world. Messages are cut "
        "into small packets and sent from machine to machine. At the end the packets are put "
        "together again."
    ),
    "a database": (
        "A database is a place where a computer keeps facts in good order. You can ask it "
        "questions and get answers quickly. Shops, banks and libraries all use databases."
    ),
    "a program": (
        "A program is a list of instructions for a computer. The computer reads the list from the "
        "top and does what each line says. People write programs in languages such as Python or C."
    ),
    "Python": (
        "Python is a programming language that is easy to read. People use it for websites, "
        "science and machine learning. A short program of a few lines can already do useful work."
    ),
    "an algorithm": (
        "An algorithm is a clear plan for solving a problem step by step. A recipe for a cake is a "
        "kind of algorithm. Computers follow algorithms to sort names, find roads and play chess."
    ),
    "a cache": (
        "A cache is a small and fast store for things that you will soon need again. Instead of "
        "doing the same work twice, a computer keeps the result in the cache. When the cache is "
        "full, the oldest things are thrown away."
    ),
    "a token": (
        "A token is a small piece of text, such as a word or a part of a word. A language model "
        "reads and writes tokens one at a time. A long word may be made of several tokens."
    ),
    "batching": (
        "Batching means doing many small jobs together. A machine that reads its weights once for "
        "sixty jobs is much faster than one that reads them sixty times. That is why servers put "
        "many requests into one batch."
    ),
    "paged attention": (
        "Paged attention stores the memory of a conversation in small blocks of the same size. A "
        "table says which blocks belong to which conversation. So no space is wasted, and many "
        "conversations can be answered together."
    ),
    "photosynthesis": (
        "Photosynthesis is how plants make their food. The leaves take in sunlight, water and air. "
        "From these the plant makes sugar to grow, and it gives back the oxygen that we breathe."
    ),
    "rain": (
        "Rain is water that falls from the clouds. The sun warms the sea and some of the water "
        "rises as vapour. High in the cold air the vapour becomes drops, and when the drops are "
        "heavy they fall as rain."
    ),
    "snow": (
        "Snow is made of small crystals of ice. When the air in a cloud is very cold, water "
        "freezes into crystals instead of drops. The crystals stick together and fall slowly to "
        "the ground."
    ),
    "a rainbow": (
        "A rainbow appears when the sun shines through drops of rain. Each drop bends the light "
        "and splits it into colours. We see red on the outside and violet on the inside."
    ),
    "wind": (
        "Wind is air that moves from one place to another. The sun warms some places more than "
        "others. Warm air rises, cold air flows in to take its place, and we feel that as wind."
    ),
    "thunder": (
        "Thunder is the sound of lightning. The lightning makes the air so hot that it grows very "
        "quickly. We hear this as a loud bang, a little after we see the light."
    ),
    "gravity": (
        "Gravity is the force that pulls things together. The Earth is very heavy, so it pulls "
        "everything towards the ground. Gravity also keeps the Moon near the Earth and the Earth "
        "near the Sun."
    ),
    "the Sun": (
        "The Sun is a star in the middle of our solar system. It is a huge ball of hot gas that "
        "gives us light and warmth. Without the Sun there would be no life on Earth."
    ),
    "the Moon": (
        "The Moon is a ball of rock that travels around the Earth. It takes about a month for one "
        "round. The Moon makes no light of its own, it only reflects the light of the Sun."
    ),
    "the Earth": (
        "The Earth is the planet on which we live. Most of it is covered with water. It turns once "
        "a day and travels around the Sun once a year."
    ),
    "a star": (
        "A star is a huge ball of hot gas that shines. The light comes from atoms that join "
        "together deep inside. Our Sun is a star, and the others look small because they are far "
        "away."
    ),
    "a planet": (
        "A planet is a large round body that travels around a star. Our solar system has eight "
        "planets. The Earth is the third one from the Sun."
    ),
    "a black hole": (
        "A black hole is a place where gravity is so strong that nothing can escape. Even light "
        "cannot get out, so it looks black. Black holes form when very large stars die."
    ),
    "electricity": (
        "Electricity is the flow of tiny charged particles through a wire. It brings energy from "
        "power plants to our homes. We use it for light, heat and machines."
    ),
    "a magnet": (
        "A magnet is a piece of metal that pulls iron towards it. It has a north pole and a south "
        "pole. Two equal poles push each other away, and two different poles attract."
    ),
    "light": (
        "Light is a kind of energy that we can see. It travels faster than anything else. White "
        "light is a mix of all the colours of the rainbow."
    ),
    "sound": (
        "Sound is a wave that moves through the air. When something shakes, it pushes the air "
        "around it. The wave reaches our ears, and we hear it."
    ),
    "an atom": (
        "An atom is a very small piece of matter. In the middle it has a core, and around it move "
        "even smaller electrons. Everything around us is made of atoms."
    ),
    "water": (
        "Water is a clear liquid that all living things need. It freezes to ice when it is cold "
        "and becomes steam when it is hot. Most of the Earth is covered with water."
    ),
    "fire": (
        "Fire is what we see when something burns. It needs fuel, air and heat. If one of the "
        "three is missing, the fire goes out."
    ),
    "a volcano": (
        "A volcano is a mountain with an opening deep into the Earth. Hot melted rock can rise "
        "through it and flow out as lava. When the lava cools, it becomes new rock."
    ),
    "an earthquake": (
        "An earthquake is a shaking of the ground. The outside of the Earth is made of large "
        "plates that move slowly. When two plates slip past each other, we feel the ground shake."
    ),
    "the ocean": (
        "The ocean is the salt water that covers most of the Earth. It is home to fish, whales and "
        "many tiny plants. The ocean also keeps our weather mild."
    ),
    "a tree": (
        "A tree is a tall plant with a trunk of wood. Its roots drink water from the ground and "
        "its leaves catch sunlight. Trees clean the air and give a home to many animals."
    ),
    "a seed": (
        "A seed is the beginning of a new plant. Inside is a tiny plant with some food. When it is "
        "warm and wet, the seed opens and starts to grow."
    ),
    "a bee": (
        "A bee is a small insect that collects sweet juice from flowers. It turns the juice into "
        "honey. Bees also carry pollen from flower to flower, which helps plants to make seeds."
    ),
    "a whale": (
        "A whale is a very large animal that lives in the sea. It is not a fish, because it "
        "breathes air and feeds its young with milk. The blue whale is the largest animal of all."
    ),
    "a dinosaur": (
        "Dinosaurs were animals that lived on Earth a very long time ago. Some were as small as a "
        "chicken, others as long as a train. Birds are the last living relatives of the dinosaurs."
    ),
    "the heart": (
        "The heart is a muscle that pumps blood through the body. It beats about once every "
        "second. The blood brings food and oxygen to every part of us."
    ),
    "the brain": (
        "The brain is the part of the body that thinks. It gets messages from the eyes, the ears "
        "and the skin. Then it decides what to do and tells the muscles."
    ),
    "sleep": (
        "Sleep is a time of rest for the body and the brain. While we sleep, the brain sorts what "
        "it learned during the day. Without enough sleep we feel tired and slow."
    ),
    "a vaccine": (
        "A vaccine teaches the body to fight an illness. It shows the body a harmless piece of the "
        "germ. If the real germ comes later, the body already knows what to do."
    ),
    "a virus": (
        "A virus is a tiny thing that can make us ill. It cannot live alone, so it enters the "
        "cells of other living things. Washing your hands helps to keep viruses away."
    ),
    "money": (
        "Money is something that people agree to trade with. Without money you would have to swap "
        "a chicken for a pair of shoes. With money you can sell the chicken today and buy the "
        "shoes tomorrow."
    ),
    "a bank": (
        "A bank is a place that keeps money safe. People put their savings into a bank, and the "
        "bank lends money to others. Those who borrow pay a little more back, which is called "
        "interest."
    ),
    "democracy": (
        "Democracy means that the people decide together. They vote for the persons who will make "
        "the laws. If the people are not happy, they can vote for others next time."
    ),
    "recycling": (
        "Recycling means that old things are made into new things. Paper, glass and metal can be "
        "used again. This saves energy and keeps the land clean."
    ),
    "a bicycle": (
        "A bicycle is a vehicle with two wheels and no motor. You turn the pedals with your feet, "
        "and a chain moves the back wheel. It is a cheap and healthy way to travel."
    ),
    "a plane": (
        "A plane is a machine that flies. Its engines push it forward very fast. The air that "
        "flows around the wings lifts the plane up into the sky."
    ),
    "a train": (
        "A train is a row of cars that rolls on rails. An engine pulls or pushes the cars. Trains "
        "can carry many people and heavy goods over long ways."
    ),
    "a telephone": (
        "A telephone carries your voice to a person far away. It turns the sound into signals and "
        "sends them through wires or the air. At the other end the signals become sound again."
    ),
    "a battery": (
        "A battery is a small store of electricity. Inside are two materials that push a current "
        "through a wire. When they are used up, the battery is empty or must be charged again."
    ),
    "music": (
        "Music is sound that people put in order. It has a rhythm, a melody and often words. Music "
        "can make us happy, sad or ready to dance."
    ),
    "friendship": (
        "Friendship means that two people like and trust each other. Friends share good times and "
        "help each other in bad times. A good friend listens and tells the truth."
    ),
    "chess": (
        "Chess is a game for two players on a board with sixty-four squares. Each player has "
        "sixteen pieces that move in different ways. You win when the king of the other player "
        "cannot escape."
    ),
}
