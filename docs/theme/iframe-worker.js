// A page that was opened from the disk may not start a worker, and the search runs in one. Here a hidden frame does its
// work. The name is the one that the theme's search asks for.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class IFrameWorker extends EventTarget {
    #waiting = [];

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      // What the script inside posts is for this side.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.addEventListener("load", () => {
        const waiting = this.#waiting;
        this.#waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
      inside.document.head.append(script);
    }

    postMessage(data) {
      if (this.#waiting) this.#waiting.push(data);
      else this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
