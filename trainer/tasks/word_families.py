"""Families of word problems: each is a program of one to four steps that tells a story while it computes.

A family says a sentence, takes a step, and ends with the question that fits the number of steps it was asked for. Every
step works on the value so far, so that the last value is the answer; all values are whole and above zero.
"""

from collections.abc import Callable

from sparkgrpo.trainer.tasks.word_tale import Tale


def purchases(tale: Tale) -> str:
    """Pieces at a price, something else, a voucher, change."""
    name, _ = tale.two_names()
    thing = tale.pick("notebooks", "door hinges", "wool socks", "paint brushes", "clay pots", "bicycle bells")
    count, price = tale.between(3, 24), tale.between(3, 45)
    tale.say(f"At the market hall {name} puts {count} {thing} on the counter, and one of them is marked {price} coins.")
    tale.start(count)
    tale.step("*", price)
    if tale.is_done:
        return f"What do the {thing} come to, in coins?"
    extra = tale.between(4, 90)
    tale.say(f"A {tale.pick('lantern', 'ladder', 'kettle', 'basket')} for {extra} coins goes on the same bill.")
    tale.step("+", extra)
    if tale.is_done:
        return "How many coins does the whole bill show?"
    voucher = min(tale.between(2, 25), tale.value - 1)
    tale.say(f"A voucher lowers the bill by {voucher} coins.")
    tale.step("-", voucher)
    if tale.is_done:
        return f"What is left for {name} to pay, in coins?"
    months = tale.between(2, 6)
    tale.say(f"{name} has the same bill again in each of {months} months, this one included.")
    tale.step("*", months)
    return f"How many coins does {name} hand over in those months together?"


def machines(tale: Tale) -> str:
    """A rate, spoiled pieces, boxes, a price a box."""
    thing = tale.pick("buttons", "postcards", "wooden spoons", "candles", "tin whistles")
    per_box, boxes = tale.between(4, 12), tale.between(6, 30)
    minutes = tale.between(5, 20)
    rate = -(-per_box * boxes // minutes) + tale.between(1, 9)
    tale.say(f"A workshop's machine turns out {rate} {thing} a minute and runs for {minutes} minutes without a pause.")
    tale.start(rate)
    tale.step("*", minutes)
    if tale.is_done:
        return f"How many {thing} lie in the tray when it stops?"
    spoiled = tale.value - per_box * boxes
    tale.say(f"The inspector throws {spoiled} faulty ones away.")
    tale.step("-", spoiled)
    if tale.is_done:
        return f"How many good {thing} does that leave?"
    tale.say(f"The good ones are packed into boxes of {per_box}, with none left over.")
    tale.step("/", per_box)
    if tale.is_done:
        return "How many boxes are filled?"
    price = tale.between(6, 60)
    tale.say(f"A dealer takes every box at {price} crowns.")
    tale.step("*", price)
    return "What does the dealer owe, in crowns?"


def ages(tale: Tale) -> str:
    """An age, an elder, a multiple, years ahead."""
    young, old = tale.two_names()
    age, gap = tale.between(4, 17), tale.between(2, 14)
    tale.say(f"{young} turned {age} this spring, and {old} was born {gap} years earlier.")
    tale.start(age)
    tale.step("+", gap)
    if tale.is_done:
        return f"How old is {old} now?"
    times = tale.between(2, 3)
    tale.say(f"Their {tale.pick('neighbour', 'piano teacher', 'coach')} is {times} times as old as {old}.")
    tale.step("*", times)
    if tale.is_done:
        return "What age is that third person?"
    ahead = tale.between(3, 20)
    tale.say(f"We look {ahead} years into the future.")
    tale.step("+", ahead)
    if tale.is_done:
        return "What age will the third person have reached by then?"
    tale.say(f"By that time {young} will be {age + ahead}.")
    tale.step("-", age + ahead)
    return f"By how many years will the third person still be ahead of {young}?"


def shares(tale: Tale) -> str:
    """A heap split evenly, something eaten, doubled by a gift, passed on."""
    name, other = tale.two_names()
    thing = tale.pick("walnuts", "marbles", "stickers", "seashells", "dried figs")
    people, each = tale.between(3, 12), tale.between(5, 40)
    tale.say(f"{people * each} {thing} are dealt out evenly among {people} friends, and {name} is one of them.")
    tale.start(people * each)
    tale.step("/", people)
    if tale.is_done:
        return f"How many {thing} does each friend get?"
    given = tale.between(3, 30)
    tale.say(f"{other}, who was not part of the round, slips {name} another {given} of them.")
    tale.step("+", given)
    if tale.is_done:
        return f"How many {thing} does {name} hold now?"
    lost = tale.part()
    tale.say(f"On the way home {lost} fall through a hole in the bag.")
    tale.step("-", lost)
    if tale.is_done:
        return f"With how many {thing} does {name} reach home?"
    times = tale.between(3, 6)
    tale.say(f"In a drawer there lie {times - 1} times as many as {name} brings home, and all of them go into one jar.")
    tale.step("*", times)
    return f"How many {thing} does the jar hold?"


def journeys(tale: Tale) -> str:
    """Speed times hours, a detour, the rest of the road, days."""
    name, _ = tale.two_names()
    vehicle = tale.pick("barge", "cargo bike", "night bus", "steam train", "pony cart")
    speed, hours = tale.between(6, 80), tale.between(2, 9)
    tale.say(f"{name} steers a {vehicle} that keeps up {speed} km an hour for {hours} hours.")
    tale.start(speed)
    tale.step("*", hours)
    if tale.is_done:
        return f"How far does the {vehicle} come, in km?"
    detour = tale.between(3, 40)
    tale.say(f"A blocked bridge then adds a detour of {detour} km.")
    tale.step("+", detour)
    if tale.is_done:
        return "How long is the stretch with its detour, in km?"
    days = tale.between(2, 7)
    tale.say(f"The very same stretch, detour and all, is covered on {days} days.")
    tale.step("*", days)
    if tale.is_done:
        return "How many km does that make over those days?"
    towed = tale.part()
    tale.say(f"For {towed} km of the total the {vehicle} had to be towed.")
    tale.step("-", towed)
    return "How many km did it cover under its own power?"


def stock(tale: Tale) -> str:
    """What is on the shelf, deliveries, sales, pallets."""
    thing = tale.pick("sacks of flour", "crates of lemonade", "rolls of felt", "tins of varnish")
    start, crates, size = tale.between(40, 400), tale.between(2, 9), tale.between(5, 25)
    tale.say(f"A storehouse counts {start} {thing} on Monday morning, and by noon {crates * size} more have come in.")
    tale.start(start)
    tale.step("+", crates * size)
    if tale.is_done:
        return f"How many {thing} are in the storehouse at noon?"
    sold = tale.part(low=10)
    tale.say(f"In the afternoon {sold} leave through the back gate.")
    tale.step("-", sold)
    if tale.is_done:
        return "How many remain in the evening?"
    times = tale.between(2, 6)
    tale.say(f"A second storehouse across the river has {times} times what remains here.")
    tale.step("*", times)
    if tale.is_done:
        return f"How many {thing} does the second storehouse have?"
    brought = tale.between(15, 120)
    tale.say(f"A late truck brings the second one {brought} more.")
    tale.step("+", brought)
    return "With how many does the second storehouse close for the night?"


def mixtures(tale: Tale) -> str:
    """Parts of a mixture, batches, spillage, bottles."""
    drink = tale.pick("lime syrup", "blue ink", "herb vinegar", "wood stain")
    bottle, bottles = tale.between(2, 9), tale.between(5, 24)
    first = tale.between(3, 30)
    batches = tale.between(2, 6)
    second = max(1, -(-bottle * bottles // batches) - first) + tale.between(1, 12)
    tale.say(f"One batch of {drink} is stirred from {first} litres of base and {second} litres of water.")
    tale.start(first)
    tale.step("+", second)
    if tale.is_done:
        return "How many litres does a batch give?"
    tale.say(f"The recipe is made {batches} times over and poured into one vat.")
    tale.step("*", batches)
    if tale.is_done:
        return "How many litres are in the vat?"
    spilled = tale.value - bottle * bottles
    tale.say(f"A leaking tap costs the vat {spilled} litres.")
    tale.step("-", spilled)
    if tale.is_done:
        return f"How many litres of {drink} can still be bottled?"
    tale.say(f"Canisters of {bottle} litres are filled until the vat is empty.")
    tale.step("/", bottle)
    return "How many canisters are needed?"


def harvests(tale: Tale) -> str:
    """Rows of plants, fruit a plant, rot, helpers."""
    plant = tale.pick("pepper", "melon", "pumpkin", "aubergine")
    helpers, each = tale.between(2, 8), tale.between(6, 35)
    rows = tale.between(3, 12)
    per_row = -(-helpers * each // rows) + tale.between(2, 9)
    tale.say(f"A garden has {rows} beds, and {per_row} {plant}s ripen in every single bed.")
    tale.start(rows)
    tale.step("*", per_row)
    if tale.is_done:
        return f"How many {plant}s ripen in the garden?"
    rotten = tale.value - helpers * each
    tale.say(f"Snails get to {rotten} of them first.")
    tale.step("-", rotten)
    if tale.is_done:
        return f"How many {plant}s escape the snails?"
    tale.say(f"What escapes is carried in by {helpers} helpers, all with equal loads.")
    tale.step("/", helpers)
    if tale.is_done:
        return f"How many {plant}s does one helper carry?"
    price = tale.between(2, 15)
    tale.say(f"A helper may sell the load at {price} pennies apiece.")
    tale.step("*", price)
    return "How many pennies does one helper earn?"


def reading(tale: Tale) -> str:
    """Pages a day, pages before, a sequel, what is left."""
    name, _ = tale.two_names()
    pages, days = tale.between(8, 60), tale.between(3, 14)
    tale.say(f"{name} reads {pages} pages of a sea novel on each evening and keeps it up for {days} evenings.")
    tale.start(pages)
    tale.step("*", days)
    if tale.is_done:
        return f"How many pages has {name} read in that time?"
    before = tale.between(5, 80)
    tale.say(f"The first {before} pages had been read on a train before that, which brings {name} to the last page.")
    tale.step("+", before)
    if tale.is_done:
        return "How many pages does the novel have?"
    volumes = tale.between(2, 5)
    tale.say(f"It opens a series of {volumes} volumes that are equally thick.")
    tale.step("*", volumes)
    if tale.is_done:
        return "How many pages does the series have?"
    maps = tale.part()
    tale.say(f"Without text, with pictures and maps alone, are {maps} pages of the series.")
    tale.step("-", maps)
    return "How many pages of text are there in the series?"


def wages(tale: Tale) -> str:
    """Hours at a wage, a bonus, rent, weeks."""
    name, _ = tale.two_names()
    hours, wage = tale.between(4, 40), tale.between(9, 35)
    job = tale.pick("glazier", "gardener", "night porter", "tailor")
    tale.say(f"As a {job}, {name} is paid {wage} euros for an hour and works {hours} hours in a week.")
    tale.start(hours)
    tale.step("*", wage)
    if tale.is_done:
        return f"How many euros is a week of {name}'s work worth?"
    bonus = tale.between(5, 75)
    tale.say(f"Every week a bonus of {bonus} euros is added.")
    tale.step("+", bonus)
    if tale.is_done:
        return "What does a week bring with the bonus, in euros?"
    weeks = tale.between(2, 12)
    tale.say(f"The contract lasts {weeks} weeks.")
    tale.step("*", weeks)
    if tale.is_done:
        return "How many euros does the contract bring?"
    tools = min(tale.part(low=20), 500)
    tale.say(f"Out of that, {tools} euros go into tools.")
    tale.step("-", tools)
    return f"How many euros remain with {name}?"


def theatres(tale: Tale) -> str:
    """Seats in rows, empty seats, tickets, a donation."""
    rows, seats = tale.between(6, 30), tale.between(8, 28)
    place = tale.pick("puppet theatre", "village cinema", "circus tent")
    tale.say(f"The stalls of a {place} are {rows} rows of {seats} chairs.")
    tale.start(rows)
    tale.step("*", seats)
    if tale.is_done:
        return "How many chairs are there in the stalls?"
    empty = tale.part()
    tale.say(f"On opening night {empty} chairs stay empty.")
    tale.step("-", empty)
    if tale.is_done:
        return "How many chairs are taken on opening night?"
    price = tale.between(3, 18)
    tale.say(f"Whoever takes a chair has paid {price} guilders at the door.")
    tale.step("*", price)
    if tale.is_done:
        return "How many guilders lie in the cash box?"
    gift = tale.between(20, 300)
    tale.say(f"A patron adds a gift of {gift} guilders.")
    tale.step("+", gift)
    return "What is in the cash box in the end, in guilders?"


def kitchens(tale: Tale) -> str:
    """Held out. A recipe scaled to guests, leftovers, trays."""
    name, _ = tale.two_names()
    dish = tale.pick("dumplings", "cheese pastries", "rice cakes", "stuffed dates")
    tray, trays = tale.between(3, 10), tale.between(4, 20)
    guests = tale.between(4, 25)
    per_guest = -(-tray * trays // guests) + tale.between(1, 5)
    tale.say(f"For a feast of {guests} guests, {name} plans {per_guest} {dish} a head.")
    tale.start(guests)
    tale.step("*", per_guest)
    if tale.is_done:
        return f"How many {dish} must be made?"
    burnt = tale.value - tray * trays
    tale.say(f"The oven ruins {burnt} of them.")
    tale.step("-", burnt)
    if tale.is_done:
        return f"How many {dish} can be served?"
    tale.say(f"They are served on trays of {tray}, each of them full.")
    tale.step("/", tray)
    if tale.is_done:
        return "How many trays are carried out?"
    spare = tale.between(2, 15)
    tale.say(f"The cupboard keeps {spare} more trays that nobody touches.")
    tale.step("+", spare)
    return f"How many trays does {name} own?"


def tiles(tale: Tale) -> str:
    """Held out. A floor of tiles, a gap, packs, a price."""
    pack, packs = tale.between(4, 16), tale.between(3, 20)
    width = tale.between(5, 24)
    depth = -(-pack * packs // width) + tale.between(1, 8)
    tale.say(
        f"A {tale.pick('hallway', 'bath house', 'courtyard')} measures {width} tiles across and {depth} tiles down."
    )
    tale.start(width)
    tale.step("*", depth)
    if tale.is_done:
        return "How many tiles cover its whole floor?"
    gap = tale.value - pack * packs
    tale.say(f"Where a fountain stands, {gap} tiles are spared.")
    tale.step("-", gap)
    if tale.is_done:
        return "How many tiles have to be laid?"
    tale.say(f"The mason orders them in packs of {pack} and uses up every pack.")
    tale.step("/", pack)
    if tale.is_done:
        return "How many packs does the mason order?"
    price = tale.between(11, 70)
    tale.say(f"A pack is billed at {price} francs.")
    tale.step("*", price)
    return "How many francs does the order cost?"


def cisterns(tale: Tale) -> str:
    """Held out. A tank that fills, rain, a leak, watering cans."""
    can, cans = tale.between(5, 15), tale.between(4, 30)
    hours = tale.between(2, 10)
    inflow = max(2, can * cans // hours - tale.between(1, 6))
    tale.say(f"A pump lifts {inflow} litres an hour into a dry cistern and is switched off after {hours} hours.")
    tale.start(inflow)
    tale.step("*", hours)
    if tale.is_done:
        return "How many litres has the pump lifted?"
    rain = max(0, can * cans - tale.value) + can * tale.between(1, 6)
    tale.say(f"Overnight the rain adds {rain} litres.")
    tale.step("+", rain)
    if tale.is_done:
        return "How many litres stand in the cistern at dawn?"
    rest = tale.value % can + can * tale.between(0, 1)
    rest = rest if 0 < rest < tale.value else can
    tale.say(f"At the bottom, {rest} litres are too muddy to use.")
    tale.step("-", rest)
    if tale.is_done:
        return "How many litres are fit for use?"
    tale.say(f"The clear water is drawn off in cans of {can} litres until none is left.")
    tale.step("/", can)
    return "How many cans are filled?"


TRAINING_FAMILIES: dict[str, Callable[[Tale], str]] = {
    family.__name__: family
    for family in (*(purchases, machines, ages, shares, journeys, stock, mixtures, harvests, reading, wages, theatres),)
}
HELDOUT_FAMILIES: dict[str, Callable[[Tale], str]] = {family.__name__: family for family in (kitchens, tiles, cisterns)}
